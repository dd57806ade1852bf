"""Whatever is written, the answer is a spec or one printable sentence: never another exception."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.spec.cluster import ClusterSpec
from myriad.spec.errors import SpecError, nearest, one_of, quoted, yaml_path
from myriad.spec.fields import Spec, spec_from_mapping
from myriad.spec.job import JobSpec
from myriad.spec.yaml_text import load_yaml

JOB: dict[str, Any] = {
    "name": "a",
    "nodes": 2,
    "time_limit": "1h",
    "env": {"A": "1"},
    "model": {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 2, "ffn_dim": 8, "vocab_size": 8},
    "layout": {"dp_shard": 2},
    "data": {"path": "x", "sequence_length": 8, "global_batch": 2},
    "optimizer": {"steps": 2, "learning_rate": 0.1},
    "checkpoint": {"directory": "d"},
}
CLUSTER: dict[str, Any] = {
    "name": "c",
    "node_types": {
        "t": {"accelerators": 2, "cpus": 1, "memory": "1GB", "nics": [{"rail": 0, "bandwidth": "1GB/s"}]}
    },
    "nodes": [{"name": "n[0-1]", "type": "t", "rack": "r", "power_feed": "p", "leaf": "l"}],
    "fabric": {level: {"bandwidth": "1GB/s"} for level in ("node", "leaf", "core")},
}

quick = settings(max_examples=150, deadline=None)

# Text with surrogates, control characters and numbers no machine holds, as JSON can carry them.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=5),
    st.characters(categories=["Cs", "Cc"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value, and a new key for each mapping."""
    if not isinstance(value, (dict, list)):
        return []
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    found = [(value, key) for key, _ in items]
    found += [(value, "nodez")] if isinstance(value, dict) else []
    return found + [place for _, inner in items for place in _places(inner)]


@pytest.mark.parametrize(("kind", "good"), [(JobSpec, JOB), (ClusterSpec, CLUSTER)])
@quick
@given(data=st.data())
def test_any_value_in_any_place(kind: type[Spec], good: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(good)
    container, key = data.draw(st.sampled_from(_places(changed)))
    container[key] = data.draw(values)
    try:
        spec = spec_from_mapping(kind, changed, "f.yaml")
    except SpecError as refused:
        assert str(refused).startswith("f.yaml: ") and str(refused).isprintable()
    else:
        assert spec_from_mapping(kind, spec.model_dump(mode="json"), "f.yaml") == spec


@quick
@given(st.text(alphabet=st.sampled_from(list("ab:-?*&!<>|[]{}#\"'\n\t ,%@`~0.1e_\\")), max_size=40))
def test_any_text_is_data_or_a_sentence(text: str) -> None:
    try:
        assert isinstance(load_yaml(text, "f.yaml"), dict)
    except SpecError as refused:
        assert str(refused).startswith("f.yaml") and "\n" not in str(refused)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lerning_rate", "learning_rate"),
        ("learningrate", "learning_rate"),
        ("Learning-Rate", "learning_rate"),
        ("lr", None),
        ("colour", None),
    ],
)
def test_nearest(name: str, found: str | None) -> None:
    assert nearest(name, ["steps", "learning_rate", "eps"]) == found


def test_parts_of_sentences() -> None:
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b", "c"]) == "a, b or c"
    assert one_of("abcdefghij") == "a, b, c, d, e, f, g, h or one of 2 more"
    assert yaml_path(("nodes", 3, "name")) == "nodes[3].name"
    assert quoted('say "hi"\n\x1b[31m') == "\"say 'hi'\\n\\x1b[31m\""
    assert quoted("x" * 100) == '"' + "x" * 57 + '..."'


@pytest.mark.parametrize("kind", [JobSpec, ClusterSpec])
def test_editors_can_have_a_schema(kind: type[Spec]) -> None:
    properties = kind.model_json_schema(mode="validation")["properties"]
    assert set(properties) == set(kind.model_fields)
