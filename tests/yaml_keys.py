"""Finding keys of the YAML that are accepted, checked, and then read by nobody.

Method: a key is a field of a class below ``Spec``. It counts as read where ``holder.field`` is loaded and ``holder``
is a name that holds such a class somewhere: a parameter, variable or field annotated with it, a function that returns
it, or a name bound to one of those. ``spec.get("env")`` and ``getattr(layout, axis)`` count too, because specs travel
to the agents as plain data. Of the class itself only public properties and methods read; a validator that merely
checks a key does not. Trade-off: names, not types, so two classes that share a holder's name and a field's name
(``spec.name``) vouch for each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tidy import Source

Models = dict[str, ast.ClassDef]
Holders = dict[str, set[str]]  # class -> names of what holds an instance


def unread_keys(package: Iterable[Source], base: str = "Spec") -> list[str]:
    """``Class.field`` of every field of every class below ``base`` that nothing in the package reads."""
    package = list(package)
    models = {
        node.name: node
        for source in package
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and base in map(_last, node.bases)
    }
    read = set(_reads(models, package))
    return [
        f"{name}.{field}"
        for name, model in models.items()
        for field in _fields(model)
        if (name, field) not in read
    ]


def _fields(model: ast.ClassDef) -> list[str]:
    return [_last(node.target) for node in model.body if isinstance(node, ast.AnnAssign)]


def _reads(models: Models, package: list[Source]) -> Iterator[tuple[str, str]]:
    """(class, field) of every read."""
    holders = _holders(models, package)
    for source in package:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and node.name in models:
                yield from ((node.name, field) for field in _read_by_itself(node))
            else:
                for holder, field in _loads(node):
                    yield from ((name, field) for name in models if holder in holders[name])
        texts = {n.value for n in ast.walk(source.tree) if isinstance(n, ast.Constant)}
        for name in _asked_by_name(source) & models.keys():
            yield from ((name, field) for field in _fields(models[name]) if field in texts)


# ---------------------------------------------------------------- who holds what


def _holders(models: Models, package: list[Source]) -> Holders:
    holders: Holders = {name: set() for name in models}
    for source in package:
        for node in ast.walk(source.tree):
            for held, annotation in _annotated(node):
                for name in {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)} & models.keys():
                    holders[name].add(held)
    for source in package:
        for node in ast.walk(source.tree):
            for target, value in _bound(node):
                sources = _sources(value)
                for name in models:
                    if not sources.isdisjoint(holders[name] | {name}):
                        holders[name].add(target)
    return holders


def _annotated(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield node.arg, node.annotation
    elif isinstance(node, ast.AnnAssign):
        yield _last(node.target), node.annotation
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.name, node.returns


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, what it is bound to) of assignments, loops and comprehensions."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(targets)
            for one, value in zip(targets, values, strict=False):
                yield _last(one), value
    elif isinstance(node, ast.For | ast.comprehension):
        target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
        yield _last(target), node.iter


def _sources(value: ast.expr) -> set[str]:
    """What a bound value is made of: itself, or the values of a list, a mapping or its ``items()``."""
    match value:
        case ast.Dict():
            return {_last(part) for part in value.values}
        case ast.List() | ast.Tuple():
            return {_last(part) for part in value.elts}
        case ast.Call(func=ast.Attribute(attr="items" | "values", value=holder)):
            return {_last(holder)}
        case _:
            return {_last(value)}


def _last(node: ast.expr) -> str:
    """The identifier that says what an expression is: ``b`` of ``a.b``, ``a.b()``, ``a.b[i]``."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Call():
            return _last(node.func)
        case ast.Subscript():
            return _last(node.value)
        case _:
            return ""


# ---------------------------------------------------------------- reads


def _loads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(holder, field) of every attribute, key and ``get``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Load()):
                yield _last(node.value), node.attr
            case ast.Subscript(slice=ast.Constant(value=str() as key)):
                yield _last(node.value), key
            case ast.Call(
                func=ast.Attribute(attr="get", value=holder), args=[ast.Constant(value=str() as key), *_]
            ):
                yield _last(holder), key


def _read_by_itself(model: ast.ClassDef) -> Iterator[str]:
    """Fields that the class's public methods and properties read."""
    for method in model.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            yield from (field for holder, field in _loads(method) if holder == "self")


def _asked_by_name(source: Source) -> set[str]:
    """Annotations of the parameters that functions of this file pass to ``getattr``."""
    found = set()
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef):
            held = {a.arg: a.annotation for a in function.args.args if a.annotation is not None}
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Name("getattr"), args=[ast.Name(name), *_]) if name in held:
                        found.add(_last(held[name]))
    return found
