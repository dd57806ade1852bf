"""YAML read as a person means it, and refused with the line at fault."""

from __future__ import annotations

import math

import pytest

from myriad.spec.errors import SpecError
from myriad.spec.yaml_text import MAX_BYTES, load_yaml


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("3e-4", 3e-4),
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("010", 10),
        ("0o17", 15),
        ("0x1f", 31),
        ("+3", 3),
        ("1_000_000", 1_000_000),
        ("12:00:00", "12:00:00"),
        ("09:30:00", "09:30:00"),
        ("1:30", "1:30"),
        ("NO", "NO"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("True", "True"),
        ("true", True),
        ("false", False),
        ("2026-01-31", "2026-01-31"),
        ("2026-01-31 10:00:00", "2026-01-31 10:00:00"),
        ("1.2.3", "1.2.3"),
        ("0b11", "0b11"),
        ("1_", "1_"),
        ("=", "="),
        ("~", None),
        ("null", None),
        ("", None),
        ('"010"', "010"),
        ("'true'", "true"),
        ("[1, 2e0, NO]", [1, 2.0, "NO"]),
        ("!!str 12", "12"),
    ],
)
def test_scalars(scalar: str, value: object) -> None:
    read = load_yaml(f"key: {scalar}\n", "f.yaml")["key"]
    assert read == value
    # The subclasses that remember their text are still the type they look like.
    assert value is None or isinstance(read, type(value))


def test_special_floats() -> None:
    read = load_yaml("a: .inf\nb: -.inf\nc: .nan\nd: 1e999", "f.yaml")
    assert read["a"] == math.inf and read["b"] == -math.inf and read["d"] == math.inf
    assert math.isnan(read["c"])


def test_numbers_remember_how_they_were_written() -> None:
    read = load_yaml("a: 3.10\nb: 010\nc: 1e-4", "f.yaml")
    assert [value.text for value in read.values()] == ["3.10", "010", "1e-4"]


def test_keys_are_text_as_written() -> None:
    assert load_yaml("on: 1\n010: 2\ntrue: 3\n", "f.yaml") == {"on": 1, "010": 2, "true": 3}


def test_anchors_and_merge_keys_work() -> None:
    text = "base: &b {rack: r0, leaf: l0}\nnode: {<<: *b, leaf: l1}\n"
    assert load_yaml(text, "f.yaml")["node"] == {"rack": "r0", "leaf": "l1"}


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines)


def _merge_bomb() -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3\n", 'f.yaml line 3: the key "a" is there twice, first in line 1; remove one'),
        ("x:\n  a: 1\n  a: 1\n", 'f.yaml line 3: the key "a" is there twice, first in line 2; remove one'),
        ("", "f.yaml: the file is empty; write keys and values, one `key: value` a line"),
        ("# only a comment\n", "f.yaml: the file is empty; write keys and values, one `key: value` a line"),
        ("- 1\n- 2\n", "f.yaml: the file holds a list; write keys and values, one `key: value` a line"),
        ("job", "f.yaml: the file holds a single value; write keys and values, one `key: value` a line"),
        ("a:\n\tb: 1\n", "f.yaml line 2: there is a tab where YAML allows only spaces; replace it by spaces"),
        (
            "a:\n  b: 1\n\tc: 1\n",
            "f.yaml line 3: there is a tab where YAML allows only spaces; replace it by spaces",
        ),
        ("a: 1\n---\nb: 2\n", 'f.yaml line 2: a second document begins; keep one, without "---" in between'),
        ("a: \x01\n", "f.yaml: the character U+0001 at position 3 is not allowed in YAML; remove it"),
        ("a: &a [*a]\n", "f.yaml line 1: an anchor contains itself"),
        ("a: *b\n", "f.yaml line 1: found undefined alias 'b'; define it with & above, or quote the text"),
        ("[a]: 1\n", "f.yaml line 1: a list or mapping cannot be a key; write a name"),
        ("x: {<<: {[a]: 1}}\n", "f.yaml line 1: a list or mapping cannot be a key; write a name"),
        ("a: !!int x\n", 'f.yaml line 1: "x" is not a whole number of at most 400 digits'),
        ("a: " + "9" * 401, f'f.yaml line 1: "{"9" * 57}..." is not a whole number of at most 400 digits'),
        ('a: "\\ud800"\n', "f.yaml line 1: the text holds half of a UTF-16 pair; write the whole character"),
        ("a: 1\n" + "#" * MAX_BYTES, "f.yaml: the file is larger than 1 MiB; is it the right one?"),
        (
            "a: " + "[" * 100 + "]" * 100,
            "f.yaml line 1: lists and mappings are nested more than 50 deep; flatten them",
        ),
        ("a: " + "[" * 5000, "f.yaml: lists and mappings are nested too deeply; flatten the file"),
    ],
)
def test_refusals_name_the_line(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_yaml(text, "f.yaml")
    assert str(refused.value) == sentence


@pytest.mark.parametrize("text", [_bomb(), _merge_bomb()])
def test_anchors_that_multiply_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="with its anchors followed the file holds more than 600,000 values"):
        load_yaml(text, "f.yaml")


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system [ls]",
        "!!timestamp x",
        "!!binary x",
        "!!set {a}",
        "!mine x",
        "!!int [1]",
    ],
)
def test_tags_run_nothing(tag: str) -> None:
    with pytest.raises(SpecError, match=r"f\.yaml line 1: "):
        load_yaml(f"a: {tag}\n", "f.yaml")
