"""The one exception for what a user wrote wrong: a single sentence, ready to print.

A :class:`SpecError` says what happened, why, and what to do next, and needs no traceback beside it. Every
door through which user text comes in (YAML, the HTTP API, admission) raises it, so CLI, API and dashboard
print the same words. pydantic's own report lists every field of every union branch over many lines; here the
user gets the first cause only, in the words of the file, because the rest is usually a consequence of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

# Two names this similar (difflib ratio) are taken for a slip of the hand: "lerning_rate", "vocabsize".
_SIMILAR = 0.6


class SpecError(ValueError):
    """What the user wrote cannot be used; ``str(error)`` is one sentence that says what to do."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like ``name``, or None when nothing is close."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=_SIMILAR)
    return folded[close[0]] if close else None


def one_of(names: Iterable[str]) -> str:
    """``a, b or c``; at most eight names, since a sentence should end."""
    listed = list(names)
    if len(listed) > 8:
        return ", ".join(listed[:8]) + f" or one of {len(listed) - 8} more"
    return " or ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]]))


def sentence(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """The first cause in a pydantic report as one sentence that names the file and the key's YAML path."""
    found = error.errors(include_url=False)
    # A misspelled key comes first: it explains the missing one.
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    path = tuple(part for part in first["loc"] if part != "[key]")  # pydantic's mark of a bad dictionary key
    kind, given, context = first["type"], first.get("input"), first.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{source}: {_unknown_key(str(path[-1]), path[:-1], model)}"
    if kind == "missing":
        return f"{source}: {_place(path[:-1])} lacks the key {quoted(path[-1])}; add it"
    if kind == "value_error":  # ours: a SpecError from a validator
        where = f"{yaml_path(path)}: " if path else ""
        return f"{source}: {where}{context['error']}"
    return f"{source}: {_place(path)} is {quoted(given)}, but {_wanted(kind, first['msg'], context)}"


def yaml_path(path: Iterable[str | int]) -> str:
    """``("nodes", 3, "name")`` as ``nodes[3].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return _visible(text)


def quoted(value: Any) -> str:
    """A value as the user would know it again, cut to a length that leaves the sentence readable."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return _clipped(str(getattr(value, "text", value)))
    return '"' + _visible(_clipped(str(value))).replace('"', "'") + '"'


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _visible(text: str) -> str:
    """Text that cannot break a line or command a terminal: what does not print becomes an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _place(path: tuple[str | int, ...]) -> str:
    return yaml_path(path) or "the document"


def _unknown_key(key: str, path: tuple[str | int, ...], model: type[BaseModel]) -> str:
    owner = _model_at(path, model)
    within = f" in {yaml_path(path)}" if path else ""
    close = nearest(key, owner.model_fields)
    hint = f'did you mean "{close}"?' if close else f"the keys here are {one_of(owner.model_fields)}"
    return f"unknown key {quoted(key)}{within}; {hint}"


def _model_at(path: tuple[str | int, ...], model: type[BaseModel]) -> type[BaseModel]:
    """The model class that a path of keys and list positions leads to."""
    current: Any = model
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = _plain(current.model_fields[str(part)].annotation)
        else:  # a list or a dictionary: the part chose an element
            current = _plain(get_args(current)[-1])
    assert isinstance(current, type) and issubclass(current, BaseModel), path
    return current


def _plain(annotation: Any) -> Any:
    """The type inside ``X | None`` and ``Annotated[X, ...]``."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    return annotation


def _wanted(kind: str, message: str, context: dict[str, Any]) -> str:
    """What a field takes, from pydantic's error type."""
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"it must be {words} {_bound(context[key])}"
    if kind == "literal_error":
        return f"it must be {context['expected']}".replace("'", '"')
    names = {
        "model_type": "it must be a mapping of keys to values",
        "dict_type": "it must be a mapping of keys to values",
        "list_type": "it must be a list",
        "float_type": "it must be a number",
        "string_type": "it must be text",
        "bool_type": "it must be true or false",
        "finite_number": "it must be a finite number",
    }
    return names.get(kind, message[:1].lower() + message[1:].replace("Input should", "it must"))


def _bound(limit: Any) -> str:
    return str(int(limit)) if isinstance(limit, float) and limit.is_integer() else str(limit)
