"""The rules of style that a machine can judge, each a function from source text to sentences.

A sentence names the file, the line and what is wrong; no sentence means tidy. Nothing is imported or run: the rules
read syntax trees, which takes about a second for the whole package. Trade-off: names are matched, not types, so a
dead function whose name is also a variable elsewhere is missed; what is reported is worth a look.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600

PURE_ROOMS = ("spec", "fabric", "cluster", "scheduler", "operations", "planner", "control")
# What the pure rooms may import beside each other: none of it reads a clock, draws a random number or does I/O.
PURE_IMPORTS = frozenset(
    (
        *("__future__", "bisect", "collections", "dataclasses", "difflib", "enum", "fractions", "functools"),
        *("heapq", "itertools", "math", "operator", "re", "statistics", "string", "types", "typing"),
        *("unicodedata", "msgspec", "pydantic", "yaml"),
    )
)
# Builtins that do I/O, run text as code, or give another answer in each process (hash of a text).
IMPURE_CALLS = frozenset({"print", "open", "input", "breakpoint", "exec", "eval", "__import__", "hash"})

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
_PROGRAM = re.compile(r"myriad(\.\w+)+")


@dataclass(frozen=True)
class Source:
    """One file: its path for sentences, its module name ("" outside the package), its text."""

    path: str
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def at(self, node: ast.stmt | ast.expr, problem: str) -> str:
        return f"{self.path}:{node.lineno}: {problem}"


def read_package(root: Path) -> list[Source]:
    """All modules below ``root``, the folder of the package."""
    return [
        Source(
            str(file.relative_to(root.parent.parent)), module_name(file.relative_to(root.parent)), _text(file)
        )
        for file in sorted(root.rglob("*.py"))
    ]


def read_folder(folder: Path) -> list[Source]:
    """Python files that are no part of the package."""
    return [
        Source(str(file.relative_to(folder.parent)), "", _text(file)) for file in sorted(folder.rglob("*.py"))
    ]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


# ---------------------------------------------------------------- size and finish


def long_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            if lines >= FUNCTION_LINES_MAX:
                yield source.at(node, f"{node.name} has {lines} lines; keep it under {FUNCTION_LINES_MAX}")


def long_file(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines >= FILE_LINES_MAX:
        yield f"{source.path}: has {lines} lines; keep it under {FILE_LINES_MAX}"


def no_docstring(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: begins without a docstring"


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := _UNFINISHED.search(line):
            yield f"{source.path}:{number}: says {found[0]}; finish it or file an issue"


def typographic(source: Source) -> Iterator[str]:
    """Quotes, dashes, dots and spaces that are not ASCII; letters of any language are fine."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for character in line:
            if ord(character) > 127 and unicodedata.category(character)[0] in "PSZC":
                yield f"{source.path}:{number}: holds {character!a} ({unicodedata.name(character, 'unnamed')})"


# ---------------------------------------------------------------- purity


def impure(source: Source) -> Iterator[str]:
    """Imports and calls with which a pure room would depend on more than its arguments."""
    room = source.module.split(".")[1:2]
    if not room or room[0] not in PURE_ROOMS:
        return
    for statement, name in _imports(source):
        top = name.split(".")[0]
        if top != "myriad" and top not in PURE_IMPORTS:
            yield source.at(statement, f"the pure room {room[0]} imports {top}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield source.at(node, f"the pure room {room[0]} calls {node.func.id}()")


def printing(source: Source) -> Iterator[str]:
    """Data leaves by ``say`` of cli/output.py, so ``print`` is nobody's and stdout belongs to the command line.

    Only training may print: a worker's stdout is the log of its rank.
    """
    if source.module.startswith("myriad.training."):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name("print")):
                yield source.at(node, "calls print(); use say or talk of cli/output.py, or a log")
            case ast.Attribute(
                attr="write" | "writelines" | "buffer", value=ast.Attribute(ast.Name("sys"), "stdout")
            ):
                if not source.module.startswith("myriad.cli."):
                    yield source.at(node, "writes to stdout; only the command line does")


def _imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every imported name in full; ``from a import b`` gives a and a.b, since b may be a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node, node.module
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


# ---------------------------------------------------------------- what nothing reaches


def dead_modules(package: Iterable[Source], entry_points: Iterable[str]) -> list[str]:
    """Modules that no entry point reaches by imports or by their name in a string (``python -m``)."""
    modules = {source.module: source for source in package}
    reached: set[str] = set()
    waiting = [*entry_points]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in modules:
            continue
        reached.add(name)
        waiting += [name.rpartition(".")[0], *mentioned_modules(modules[name])]
    return [f"{modules[name].path}: no entry point reaches it" for name in sorted(modules.keys() - reached)]


def mentioned_modules(source: Source) -> Iterator[str]:
    """What a file imports, or names in a string of its own, as a program or as a module."""
    for _, name in _imports(source):
        yield name
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _PROGRAM.fullmatch(node.value):
            yield node.value
            yield f"{node.value}.__main__"


def dead_definitions(package: Iterable[Source], others: Iterable[Source]) -> list[str]:
    """Public functions and classes at the top of a module that nothing else mentions, tests included."""
    package = list(package)
    mentions: dict[str, int] = {}
    for source in (*package, *others):
        for name in _mentions(source.tree):
            mentions[name] = mentions.get(name, 0) + 1
    found = []
    for source in package:
        for node in source.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            own = sum(name == node.name for name in _mentions(node))
            if not node.name.startswith("_") and mentions.get(node.name, 0) == own:
                found.append(source.at(node, f"nothing mentions {node.name}"))
    return found


def _mentions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.alias():
                yield node.name.rpartition(".")[2]
            case ast.Constant(value=str() as text) if text.isidentifier():
                yield text
