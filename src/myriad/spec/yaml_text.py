"""YAML read as a person means it: plain data from one small document, or one sentence with the line at fault.

PyYAML implements YAML 1.1, where ``1e-4`` is text, ``12:00:00`` is 43200, ``010`` is 8, ``NO`` is false, and
a duplicate key silently wins. The loader here keeps PyYAML's parser and replaces its resolution: numbers are
decimal (``0x1f`` and ``0o17`` aside) with or without an exponent, only ``true`` and ``false`` are booleans,
times and dates stay text, keys are always text, and a key may appear once. Numbers remember how they were
written, so that a field that wants text (an environment variable's value) gets ``3.10`` and not ``3.1``. The
pure Python parser takes 4 s for 1 MB; documents are limited to 1 MiB, and to as many values as such a text
can hold by itself, which stops anchors that multiply.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from myriad.spec.errors import SpecError, quoted

MAX_BYTES = 2**20  # of text; 12,000 nodes written out one by one have 0.9 MB
MAX_VALUES = (
    600_000  # scalars, lists and mappings after anchors are followed; 1 MiB of [1,1,...] holds 524,286
)
MAX_DIGITS = 400  # of a whole number; a float ends at 309
MAX_DEPTH = 50  # nested lists and mappings; PyYAML recurses

_INT = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_BOOL = re.compile(r"true|false")
_NULL = re.compile(r"~|null|Null|NULL|")


class WrittenInt(int):
    """An int that remembers its text."""

    text: str


class WrittenFloat(float):
    """A float that remembers its text."""

    text: str


def load_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping in ``text``; ``source`` names the file in the SpecError that anything else raises."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError(f"{source}: the file is larger than 1 MiB; is it the right one?")
    try:
        loader = _Loader(text)
        try:
            return _document(loader, source)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise SpecError(_syntax_sentence(error, source)) from None
    except yaml.reader.ReaderError as error:
        raise SpecError(
            f"{source}: the character U+{error.character:04X} at position {error.position} is not allowed in "
            f"YAML; remove it"
        ) from None
    except RecursionError:
        raise SpecError(f"{source}: lists and mappings are nested too deeply; flatten the file") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the resolution of scalars and the construction below."""


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> WrittenInt:
    text = str(loader.construct_scalar(node))
    if not _INT.fullmatch(text) or len(text) > MAX_DIGITS:
        raise _at(node, f"{quoted(text)} is not a whole number of at most {MAX_DIGITS} digits")
    digits = text.replace("_", "").lower()
    number = WrittenInt(int(digits, 16 if "0x" in digits else 8 if "0o" in digits else 10))
    number.text = text
    return number


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> WrittenFloat:
    text = str(loader.construct_scalar(node))
    if not _FLOAT.fullmatch(text):
        raise _at(node, f"{quoted(text)} is not a number")
    number = WrittenFloat(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    number.text = text
    return number


def _construct_bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node))
    if not _BOOL.fullmatch(text):
        raise _at(node, f"{quoted(text)} is neither true nor false")
    return text == "true"


def _construct_null(loader: _Loader, node: yaml.ScalarNode) -> None:
    loader.construct_scalar(node)


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _at(node, "the text holds half of a UTF-16 pair; write the whole character")
    return text


def _construct_list(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node, deep=True))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _at(node, "the tag !!map is on something that is no mapping; remove it")
    loader.flatten_mapping(node)
    return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}


_PREFIX = "tag:yaml.org,2002:"

# Own tables, not PyYAML's: without its rules for dates, base 60 and yes/no, and without its constructors for
# tags such as
# !!timestamp, which fail in ways of their own.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", _BOOL, "tf"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile("<<"), "<"),
):
    _Loader.add_implicit_resolver(_PREFIX + _tag, re.compile(f"(?:{_pattern.pattern})$"), list(_first))
_Loader.yaml_constructors = {
    _PREFIX + "bool": _construct_bool,
    _PREFIX + "int": _construct_int,
    _PREFIX + "float": _construct_float,
    _PREFIX + "null": _construct_null,
    _PREFIX + "str": _construct_text,
    _PREFIX + "seq": _construct_list,
    _PREFIX + "map": _construct_mapping,
    None: yaml.SafeLoader.construct_undefined,
}


def _document(loader: _Loader, source: str) -> dict[str, Any]:
    root = loader.get_single_node()
    if root is None:
        raise SpecError(f"{source}: the file is empty; write keys and values, one `key: value` a line")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise SpecError(f"{source}: the file holds {kind}; write keys and values, one `key: value` a line")
    _count_values(root, {}, 0)
    mapping = loader.construct_document(root)
    assert isinstance(mapping, dict)  # the only constructor left for a mapping
    return mapping


def _count_values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Values under a node after aliases are followed; refuses loops, depth and multiplication."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise _at(node, "an anchor contains itself")
        return known[id(node)]
    if depth > MAX_DEPTH:
        raise _at(node, f"lists and mappings are nested more than {MAX_DEPTH} deep; flatten them")
    known[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    total = 1 + sum(_count_values(child, known, depth + 1) for child in children)
    if total > MAX_VALUES:
        raise _at(
            node,
            f"with its anchors followed the file holds more than {MAX_VALUES:,} values; write it out shorter",
        )
    known[id(node)] = total
    return total


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _at(key, "a list or mapping cannot be a key; write a name")
        line = key.start_mark.line + 1
        if key.value in lines:
            raise _at(
                key,
                f"the key {quoted(key.value)} is there twice, first in line {lines[key.value]}; remove one",
            )
        lines[key.value] = line


def _at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _syntax_sentence(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f" line {mark.line + 1}" if mark else ""
    problem = " ".join((error.problem or str(error)).split())
    if "'\\t'" in problem:
        problem = "there is a tab where YAML allows only spaces; replace it by spaces"
    elif "expected a single document" in " ".join(filter(None, (error.context, error.problem))):
        problem = 'a second document begins; keep one, without "---" in between'
    elif "undefined alias" in problem:
        problem = f"{problem}; define it with & above, or quote the text"
    return f"{source}{where}: {problem}"
