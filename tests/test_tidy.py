"""Style as a test: every rule of ``tidy`` and ``yaml_keys`` holds for the package, and each is shown to bite."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tidy
import yaml_keys
from tidy import Source

ROOT = Path(__file__).parents[1]
# Folders that use the package as people do, and so keep a module alive; a test alone does not.
PROGRAMS = ("examples", "benchmarks", "docs")
USERS = ("tests", *PROGRAMS)

# Keys that describe a cluster and that nothing acts on yet; docs/assumptions.md says so to users. A key that comes
# to be read has to leave this list.
UNREAD_KEYS: tuple[str, ...] = ()

FileRule = Callable[[Source], Iterable[str]]
RULES_FOR_ALL: tuple[FileRule, ...] = (tidy.long_file, tidy.unfinished)
# A test's table of stories may be long, so tests are free of the length of functions.
RULES_FOR_PROGRAMS: tuple[FileRule, ...] = (tidy.long_functions,)
RULES_FOR_THE_PACKAGE: tuple[FileRule, ...] = (
    tidy.no_docstring,
    tidy.typographic,
    tidy.impure,
    tidy.printing,
)


@cache
def package() -> tuple[Source, ...]:
    return tuple(tidy.read_package(ROOT / "src" / "myriad"))


@cache
def users() -> tuple[Source, ...]:
    return tuple(source for name in USERS for source in tidy.read_folder(ROOT / name))


def checked_elsewhere(source: Source) -> bool:
    """The rules and their bad snippets hold the very words they look for."""
    return source.path not in ("tests/tidy.py", "tests/test_tidy.py")


def entry_points() -> Iterator[str]:
    """The console script, and what programs outside the package import or start."""
    yield "myriad"
    for name in PROGRAMS:
        for source in tidy.read_folder(ROOT / name):
            yield from tidy.mentioned_modules(source)
    yield from (target.split(":")[0] for target in project()["scripts"].values())


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("rule", RULES_FOR_ALL, ids=lambda rule: rule.__name__)
def test_every_file(rule: FileRule) -> None:
    sources = [*package(), *filter(checked_elsewhere, users())]
    assert [problem for source in sources for problem in rule(source)] == []


@pytest.mark.parametrize("rule", RULES_FOR_PROGRAMS, ids=lambda rule: rule.__name__)
def test_package_and_programs(rule: FileRule) -> None:
    sources = [*package(), *(source for source in users() if not source.path.startswith("tests/"))]
    assert [problem for source in sources for problem in rule(source)] == []


@pytest.mark.parametrize("rule", RULES_FOR_THE_PACKAGE, ids=lambda rule: rule.__name__)
def test_package(rule: FileRule) -> None:
    assert [problem for source in package() for problem in rule(source)] == []


def test_no_dead_modules() -> None:
    assert tidy.dead_modules(package(), entry_points()) == []


def test_no_dead_definitions() -> None:
    assert tidy.dead_definitions(package(), users()) == []


def test_every_dependency_is_imported() -> None:
    """Names of distributions are those of their packages, but for pyyaml."""
    wanted = {re.split(r"[^\w-]", text)[0] for text in project()["dependencies"]}
    imported = {name.split(".")[0] for source in package() for name in tidy.mentioned_modules(source)}
    assert {name for name in wanted if {"pyyaml": "yaml"}.get(name, name) not in imported} == set()


def test_every_yaml_key_is_read() -> None:
    assert sorted(yaml_keys.unread_keys(package())) == sorted(UNREAD_KEYS)


# ---------------------------------------------------------------- the rules


def long_function(lines: int) -> str:
    return "def long():\n" + "    pass\n" * (lines - 1)


# name, rule, module, text, the words its sentence must hold ("" when the text is tidy)
SNIPPETS: tuple[tuple[str, FileRule, str, str, str], ...] = (
    ("69 lines", tidy.long_functions, "myriad.a", long_function(69), ""),
    ("70 lines", tidy.long_functions, "myriad.a", long_function(70), "long has 70 lines"),
    ("70 with decorator", tidy.long_functions, "myriad.a", "@staticmethod\n" + long_function(69), "70 lines"),
    ("a method", tidy.long_functions, "myriad.a", "class A:\n  def long():\n" + "    1\n" * 69, "70 lines"),
    ("600 lines", tidy.long_file, "myriad.a", "pass\n" * 600, "600 lines"),
    ("599 lines", tidy.long_file, "myriad.a", "pass\n" * 599, ""),
    ("no docstring", tidy.no_docstring, "myriad.a", "pass\n", "without a docstring"),
    ("docstring", tidy.no_docstring, "myriad.a", '"""Here."""\n', ""),
    ("todo", tidy.unfinished, "myriad.a", "pass  # TODO later\n", "TODO"),
    ("fixme", tidy.unfinished, "myriad.a", '"""FIXME"""\n', "FIXME"),
    ("no todo", tidy.unfinished, "myriad.a", "TODOS = 1\n", ""),
    ("dash", tidy.typographic, "myriad.a", "# a \u2013 b\n", "EN DASH"),
    ("quotes", tidy.typographic, "myriad.a", "# \u201ca\u201d\n", "QUOTATION MARK"),
    ("no-break space", tidy.typographic, "myriad.a", "# a\u00a0b\n", "NO-BREAK SPACE"),
    ("letters", tidy.typographic, "myriad.a", "# na\u00efve \u4e07\n", ""),
    ("clock", tidy.impure, "myriad.control.a", "import time\n", "imports time"),
    ("clock inside", tidy.impure, "myriad.spec.a", "def f():\n    from time import sleep\n", "imports time"),
    ("date", tidy.impure, "myriad.planner.a", "from datetime import datetime\n", "imports datetime"),
    ("randomness", tidy.impure, "myriad.scheduler.a", "import random\n", "imports random"),
    ("numpy's randomness", tidy.impure, "myriad.fabric.a", "import numpy.random\n", "imports numpy"),
    ("system", tidy.impure, "myriad.cluster.a", "from os import environ\n", "imports os"),
    ("process", tidy.impure, "myriad.control.a", "import subprocess\n", "imports subprocess"),
    ("network", tidy.impure, "myriad.control.a", "import socket\n", "imports socket"),
    ("files", tidy.impure, "myriad.operations.a", "def f():\n    return open('x')\n", "calls open()"),
    ("torch", tidy.impure, "myriad.planner.a", "import torch.distributed as dist\n", "imports torch"),
    ("order of a set", tidy.impure, "myriad.control.a", "x = hash('a')\n", "calls hash()"),
    ("pure", tidy.impure, "myriad.control.a", "import math\nfrom myriad.spec.job import JobSpec\n", ""),
    ("shell", tidy.impure, "myriad.runtime.a", "import time, os, socket\nopen('x')\n", ""),
    ("print", tidy.printing, "myriad.runtime.a", "print('x')\n", "calls print()"),
    ("a rank's log", tidy.printing, "myriad.training.a", "print('x')\n", ""),
    ("stdout", tidy.printing, "myriad.agent.a", "sys.stdout.write('x')\n", "writes to stdout"),
    ("stdout of a command", tidy.printing, "myriad.cli.a", "sys.stdout.write('x')\n", ""),
    ("own print", tidy.printing, "myriad.cli.a", "_print('x')\nconsole.print('x')\n", ""),
)


@pytest.mark.parametrize("name, rule, module, text, want", SNIPPETS, ids=[row[0] for row in SNIPPETS])
def test_rule(name: str, rule: FileRule, module: str, text: str, want: str) -> None:
    found = list(rule(Source("a.py", module, text)))
    if want:
        assert found and all(sentence.startswith("a.py") for sentence in found), found
        assert want in found[0]
    else:
        assert found == []


def snippets(**texts: str) -> list[Source]:
    """Modules of a package; ``a_b`` stands for myriad.a.b."""
    names = {key: "myriad." + key.replace("_", ".") if key != "myriad" else key for key in texts}
    return [Source(f"{key}.py", names[key], text) for key, text in texts.items()]


def test_a_module_is_reached_by_import_by_parent_and_by_name() -> None:
    found = tidy.dead_modules(
        [
            *snippets(
                main="from myriad import lib\nimport myriad.deep.inner\nPROGRAM = 'myriad.tool'\n",
                myriad="",
                lib="from myriad.used import thing\n",
                used="",
                deep="",
                deep_inner="",
                tool="",
                dead="import myriad.main\n",
            ),
            Source("tool_main.py", "myriad.tool.__main__", "from myriad.only_by_tool import x\n"),
            Source("only.py", "myriad.only_by_tool", ""),
        ],
        ["myriad.main"],
    )
    assert found == ["dead.py: no entry point reaches it"]


def test_a_definition_is_dead_when_only_itself_mentions_it() -> None:
    module = (
        "def used(): ...\n"
        "def recursive(): recursive()\n"
        "class Unused: ...\n"
        "def _private(): ...\n"
        "def by_a_test(): ...\n"
        "def by_name(): ...\n"
        "used()\n"
    )
    test = Source("test_a.py", "", "from myriad.a import by_a_test\ngetattr(a, 'by_name')\n")
    assert tidy.dead_definitions(snippets(a=module), [test]) == [
        "a.py:2: nothing mentions recursive",
        "a.py:3: nothing mentions Unused",
    ]


DEFINITION = """
class Inner(Spec):
    by_loop: int
    by_getattr: int
    dead: int
class Outer(Spec):
    inners: list[Inner]
    by_key: int
    by_method: int
    only_checked: int
    elsewhere: int
    def public(self): return self.by_method
    def _check(self): assert self.only_checked
"""
READERS = """
def f(outer: Outer, plain: dict):
    for each in outer.inners:
        each.by_loop
    spec = outer
    spec.get("by_key")
    other.elsewhere
def g(inner: Inner, name):
    getattr(inner, name)
NAMES = ("by_getattr",)
"""


def test_a_key_is_unread_when_only_its_validator_or_another_thing_reads_it() -> None:
    found = yaml_keys.unread_keys(snippets(defined=DEFINITION, reader=READERS))
    assert found == ["Inner.dead", "Outer.only_checked", "Outer.elsewhere"]
