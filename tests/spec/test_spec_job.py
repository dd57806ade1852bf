"""Jobs: what a user may write, what it becomes, and the sentence for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from myriad.spec.cluster import NodeType
from myriad.spec.errors import SpecError
from myriad.spec.fields import spec_from_mapping
from myriad.spec.job import JobSpec, LayoutSpec, job_from_yaml

COMMAND = "name: hello\nnodes: 1\ncommand: python train.py --lr 3e-4\n"

MODEL = """
name: tiny
nodes: 4
spares: 1
time_limit: 12:00:00
model: {layers: 4, dim: 64, heads: 4, kv_heads: 2, ffn_dim: 128, vocab_size: 256}
layout: {pp: 2, dp_shard: 2, tp: 2, microbatches: 2}
data: {path: runs/text, sequence_length: 64, global_batch: 8}
optimizer: {steps: 1e2, learning_rate: 3e-4, warmup_steps: 10}
checkpoint: {every_steps: 10}
"""


def model_job(**changes: Any) -> dict[str, Any]:
    """The model job above as plain data, with ``section__key=value`` changed (None removes)."""
    job = job_from_yaml(MODEL, "job.yaml").model_dump(mode="json")
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = job
        for section in sections:
            place = place[section]
        place[key] = value
    return job


def test_a_command_runs_in_a_shell_when_it_is_text_and_as_given_when_it_is_a_list() -> None:
    job = job_from_yaml(COMMAND, "job.yaml")
    assert job.command == ["/bin/sh", "-c", "python train.py --lr 3e-4"]
    assert not job.uses_torch
    job = job_from_yaml(
        "name: a\nnodes: 1\ncommand: [python, train.py, --lr, 3e-4, --bf16, true]", "job.yaml"
    )
    assert job.command == ["python", "train.py", "--lr", "3e-4", "--bf16", "true"]


def test_a_model_job_is_read_as_meant() -> None:
    job = job_from_yaml(MODEL, "job.yaml")
    assert job.uses_torch and job.model is not None and job.optimizer is not None
    assert job.time_limit == 43200.0
    assert job.optimizer.steps == 100 and isinstance(job.optimizer.steps, int)
    assert job.optimizer.learning_rate == 3e-4
    assert (job.layout.world, job.layout.dp, job.model.head_dim) == (8, 2, 16)
    assert job.checkpoint.directory is None


NO_CREDENTIALS = (
    "data: a data set's URL must be s3://BUCKET/PREFIX; credentials and the endpoint belong into the "
    "environment of `myriad up` (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
)
NO_REMOTE = (
    "checkpoint: remote must be s3://BUCKET/PREFIX; credentials and the endpoint belong into the "
    "environment of `myriad up` (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
)


@pytest.mark.parametrize("text", [COMMAND, MODEL])
def test_a_job_survives_json(text: str) -> None:
    job = job_from_yaml(text, "job.yaml")
    again = JobSpec.model_validate(json.loads(json.dumps(job.model_dump(mode="json"))))
    assert again == job


def test_workers_are_the_accelerators_unless_said_otherwise() -> None:
    node_type = NodeType(accelerators=8, cpus=64, memory=2**40)
    job = job_from_yaml(COMMAND, "job.yaml")
    assert job.workers_per_node_on(node_type) == 8
    assert job.model_copy(update={"workers_per_node": 2}).workers_per_node_on(node_type) == 2


def test_environment_values_are_the_text_that_was_written() -> None:
    text = COMMAND + "env: {LR: 1e-4, PY: 3.10, CODE: 010, ON: on, YES: true, DAY: 2026-01-31, T: 12:00:00}\n"
    assert job_from_yaml(text, "job.yaml").env == {
        "LR": "1e-4",
        "PY": "3.10",
        "CODE": "010",
        "ON": "on",
        "YES": "true",
        "DAY": "2026-01-31",
        "T": "12:00:00",
    }


def test_environment_values_may_span_lines() -> None:
    assert job_from_yaml(COMMAND + 'env: {A: "1\\n2"}\n', "job.yaml").env == {"A": "1\n2"}
    assert job_from_yaml(COMMAND + "env:\n  A: |\n    1\n    2\n", "job.yaml").env == {"A": "1\n2\n"}


@pytest.mark.parametrize("name", ["a/b c", "实验 7", "naïve", "../../etc", "-rf", "x" * 200, "🚀", "007"])
def test_a_name_is_only_a_label(name: str) -> None:
    assert job_from_yaml(f"name: {name}\nnodes: 1\ncommand: x", "job.yaml").name == name


def test_a_layout_says_itself() -> None:
    assert str(LayoutSpec(pp=2, dp_shard=2, tp=2, microbatches=4)) == "pp 2 x dp_shard 2 x tp 2"
    assert str(LayoutSpec()) == "one rank"


@pytest.mark.parametrize(
    ("addition", "sentence"),
    [
        ("nam: x", 'unknown key "nam"; did you mean "name"?'),
        (
            "zebra: x",
            (
                'unknown key "zebra"; the keys here are name, nodes, spares, node_type, workers_per_node,'
                " time_limit, env, workdir or one of 7 more"
            ),
        ),
        (
            "checkpoint: {every-steps: 3}",
            'unknown key "every-steps" in checkpoint; did you mean "every_steps"?',
        ),
        (
            "checkpoint: {remote: 's3://key:word@bucket/run'}",
            NO_REMOTE,
        ),
        (
            "checkpoint: {remote: /data/runs}",
            NO_REMOTE,
        ),
        (
            "data: {path: 's3://key:word@bucket/text', sequence_length: 8, global_batch: 8}",
            NO_CREDENTIALS,
        ),
        ("checkpoint: {keep: 0}", "checkpoint.keep is 0, but it must be at least 1"),
        ("checkpoint: 5", "checkpoint is 5, but it must be a mapping of keys to values"),
        ("spares: -1", "spares is -1, but it must be at least 0"),
        ("spares: two", 'spares: "two" is given where a whole number is wanted'),
        ("spares: 1.5", "spares: 1.5 is given where a whole number is wanted"),
        ("spares: true", "spares: true is given where a whole number is wanted"),
        ("seed: 1e30", "seed is 1e30, but it must be at most 9223372036854775807"),
        ("time_limit: 0", "time_limit is 0, but it must be more than 0"),
        (
            "time_limit: soon",
            (
                'time_limit: "soon" is not a quantity; write seconds or a duration such as "90m", "1.5h" '
                'or "12:00:00"'
            ),
        ),
        ("env: [A=1]", "env is a list, but it must be a mapping of keys to values"),
        ("env: {A: }", 'env.A: nothing is given where text is wanted; write "" for empty text'),
        ("env: {A: [1]}", "env.A: a list is given where text is wanted"),
        (
            'env: {"A=B": 1}',
            'env.A=B: "A=B" cannot name an environment variable; use a name without "=" and NUL',
        ),
        ('env: {"": 1}', 'env.: "" cannot name an environment variable; use a name without "=" and NUL'),
        ('env: {A: "x\\0y"}', 'env.A: "x\\x00y" holds a NUL character; remove it'),
        (
            "env: {RANK: 1}",
            'env.RANK: "RANK" is set by Myriad for every worker; remove it or use another name',
        ),
        (
            "data: {path: a, sequence_length: 8, global_batch: 1}",
            "data is only read for a job with a model, and this one has a command; remove it",
        ),
        (
            "layout: {tp: 2}",
            "layout is only read for a job with a model, and this one has a command; remove it",
        ),
        (
            "model: {layers: 1, dim: 8, heads: 2, kv_heads: 2, ffn_dim: 8, vocab_size: 8}",
            "the job has both a command and a model; keep one of them",
        ),
    ],
)
def test_refusals_of_a_command_job(addition: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        job_from_yaml(COMMAND + addition, "job.yaml")
    assert str(refused.value) == f"job.yaml: {sentence}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes: 1\ncommand: x", 'the document lacks the key "name"; add it'),
        ("name: a\nnodes: 1", "the job has neither a command nor a model; add one of them"),
        ("name: a\nnodes: 0\ncommand: x", "nodes is 0, but it must be at least 1"),
        ("name: a\nnodes: 10_000_000\ncommand: x", "nodes is 10_000_000, but it must be at most 1000000"),
        ('name: " "\nnodes: 1\ncommand: x', 'name: " " has 1 characters; give 1 to 200, not all blank'),
        (
            'name: "a\\nb"\nnodes: 1\ncommand: x',
            'name: "a\\nb" holds the control character U+000A; remove it',
        ),
        ("name: [a]\nnodes: 1\ncommand: x", "name: a list is given where text is wanted"),
        (
            "name: a\nnodes: 1\ncommand: []",
            "command: the command names no program; write what to run, for example: [python, train.py]",
        ),
        (
            "name: a\nnodes: 1\ncommand: ''",
            "command: the command is empty; write what to run, for example: python train.py",
        ),
        ("name: a\nnodes: 1\ncommand: [echo, [x]]", "command[1]: a list is given where text is wanted"),
    ],
)
def test_refusals_of_a_document(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        job_from_yaml(text, "job.yaml")
    assert str(refused.value) == f"job.yaml: {sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": None}, 'the job has a model but no data; add the key "data"'),
        ({"optimizer": None}, 'the job has a model but no optimizer; add the key "optimizer"'),
        (
            {"optimizer": {"steps": 3, "lerning_rate": 1}},
            'unknown key "lerning_rate" in optimizer; did you mean "learning_rate"?',
        ),
        ({"optimizer": {"steps": 3}}, 'optimizer lacks the key "learning_rate"; add it'),
        (
            {"optimizer__warmup_steps": 101},
            "optimizer: warmup_steps 101 is more than steps 100; lower warmup_steps",
        ),
        (
            {"optimizer__min_learning_rate": 1.0},
            "optimizer: min_learning_rate 1.0 is more than learning_rate 0.0003; lower it",
        ),
        (
            {"optimizer__learning_rate": float("inf")},
            "optimizer.learning_rate is inf, but it must be a finite number",
        ),
        ({"optimizer__learning_rate": "fast"}, 'optimizer.learning_rate is "fast", but it must be a number'),
        ({"optimizer__beta1": 1}, "optimizer.beta1 is 1, but it must be less than 1"),
        (
            {"model__heads": 3},
            "model: dim 64 does not divide by heads 3; change one of them (to heads 2, 4?)",
        ),
        (
            {"model__kv_heads": 3},
            "model: heads 4 does not divide by kv_heads 3; change one of them (to kv_heads 2, 4?)",
        ),
        (
            {"model__dim": 12},
            (
                "model: dim 12 over heads 4 makes 3 numbers a head, but rotary positions need an even "
                "number; change dim or heads"
            ),
        ),
        ({"model__dtype": "fp8"}, 'model.dtype is "fp8", but it must be "float32", "float64" or "bfloat16"'),
        (
            {"layout__tp": 3},
            "model.heads 4 does not divide by layout.tp 3; change one of them (to layout.tp 2, 4?)",
        ),
        (
            {"layout__tp": 4},
            "model.kv_heads 2 does not divide by layout.tp 4; change one of them (to layout.tp 2?)",
        ),
        (
            {"model__vocab_size": 257},
            "model.vocab_size 257 does not divide by layout.tp 2; change one of them (to layout.tp 1?)",
        ),
        (
            {"model__layers": 5},
            "model.layers 5 does not divide by layout.pp 2; change one of them (to layout.pp 1, 5?)",
        ),
        ({"model__layers": 1}, "model.layers 1 is less than layout.pp 2; lower layout.pp"),
        (
            {"data__sequence_length": 63},
            "data.sequence_length 63 does not divide by layout.tp 2; change one of them (to layout.tp 1, 3?)",
        ),
        (
            {"data__global_batch": 6},
            (
                "data.global_batch 6 does not divide by 4 (dp_replicate 1 x dp_shard 2 x microbatches 2);"
                " set it to a multiple of 4"
            ),
        ),
        (
            {"layout__microbatches": 1},
            (
                "layout: pp 2 needs at least 2 microbatches to fill the pipeline, not 1; set microbatches"
                " to a multiple of 2"
            ),
        ),
        ({"layout__schedule": "zb"}, 'layout.schedule is "zb", but it must be "1f1b" or "gpipe"'),
        (
            {"data__path": None},
            "data: data has neither path nor sources; give the path of one dataset, or sources with a weight each",
        ),
        (
            {"data__sources": [{"path": "a"}]},
            "data: data has both path and sources; give the path of one dataset, or sources with a weight each",
        ),
        (
            {"data__path": None, "data__sources": [{"path": "a"}, {"path": "a", "weight": 2}]},
            "data: data.sources names a twice; name it once, with the weights added up",
        ),
        (
            {"data__path": None, "data__sources": [{"path": "a", "weight": 0}]},
            "data.sources[0].weight is 0, but it must be more than 0",
        ),
        (
            {"data__path": "ftp://host/text"},
            (
                'data: "ftp://host/text" has a scheme that is not known; give a path, or a URL that begins with '
                "s3://, gs://, az:// or file://"
            ),
        ),
        (
            {"data__cache": {"directory": "/nvme", "size": "1GB"}},
            (
                "data: data.cache keeps what is read from object storage, and no dataset of this job is behind a "
                "URL; remove it"
            ),
        ),
        (
            {"data__path": "s3://b/text", "data__cache": {"directory": "/nvme", "size": "1MB"}},
            'data.cache.size is "1MB", but it must be at least 67108864',
        ),
        ({"data__prefetch": 65}, "data.prefetch is 65, but it must be at most 64"),
        ({"data__path": " "}, "data.path: the path is empty; write the path of a file or folder"),
    ],
)
def test_refusals_of_a_model_job(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec_from_mapping(JobSpec, model_job(**changes), "job.yaml")
    assert str(refused.value) == f"job.yaml: {sentence}"


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({}, 0),
        ({"data__path": "s3://b/text"}, 4),
        ({"data__path": None, "data__sources": [{"path": "a"}, {"path": "s3://b/text"}]}, 4),
        ({"data__path": "s3://b/text", "data__prefetch": 0}, 0),
        ({"data__prefetch": 2}, 2),
    ],
)
def test_batches_are_read_ahead_from_urls(changes: dict[str, Any], ahead: int) -> None:
    data = spec_from_mapping(JobSpec, model_job(**changes), "job.yaml").data
    assert data is not None and data.batches_ahead == ahead
