"""The probe, the plan made from it, and datasets: commands that need no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from live import cluster_of
from myriad.cli import probe as probing
from myriad.cli.main import main
from myriad.planner import Probe

MODEL = """
name: llama
nodes: 2
model: {layers: 2, dim: 64, heads: 4, kv_heads: 4, ffn_dim: 128, vocab_size: 512}
layout: {tp: 2, dp_shard: 2}
data: {path: tokens, sequence_length: 64, global_batch: 8}
optimizer: {steps: 10, learning_rate: 1e-3}
"""
MEASURED = {
    "gemm_flops_per_s": 5e10,
    "loopback_bytes_per_s": 2e9,
    "loopback_latency_s": 2e-5,
    "cores": 2,
    "emulated": True,
    "storage_write_bytes_per_s": 1e8,
    "memory_copy_bytes_per_s": 5e9,
    "fork_s": 0.01,
    "template_s": 1.5,
}


def test_the_probe_measures_this_machine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = probing.probe(tmp_path / "empty")
    assert isinstance(found, Probe)
    assert 1e8 < found.gemm_flops_per_s < 1e13 and 1e7 < found.loopback_bytes_per_s < 1e12
    assert 0 < found.loopback_latency_s < 0.1 and found.cores >= 1
    assert 0 < (found.fork_s or 0) < 1 and 0 < found.template_s <= probing.LIMIT_S
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job, a cluster, and a state that has been measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MYRIAD_STATE", "state")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "probe.json").write_text(json.dumps(MEASURED))
    (tmp_path / "job.yaml").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster_of(4, accelerators=2)))
    return tmp_path


def test_a_plan_predicts_what_it_can_and_says_what_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
    shown = capsys.readouterr().out
    ledger = dict(
        line.split(maxsplit=1) for line in shown.partition("CAUSE")[2].splitlines() if len(line.split()) > 1
    )
    predicted = {cause for cause, amount in ledger.items() if amount.replace(".", "").isdigit()}
    assert predicted == {"compute", "pipeline_bubble", "exposed_communication", "checkpoint_wait", "startup"}
    assert ledger["lost_work"] == ledger["detection"] == "not predicted"
    assert "step time" in shown and "parameters" in shown


def test_a_plan_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--json"]) == 0
    out, told = capsys.readouterr()
    plan = json.loads(out)
    assert told == "" and plan["peak_flops_per_s"] == MEASURED["gemm_flops_per_s"]
    assert plan["ledger"]["lost_work"] is None and plan["ledger"]["compute"] > 0


def test_a_dataset_is_built_from_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text").mkdir()
    (folder / "text" / "a.md").write_text("hello")
    (folder / "text" / "b.md").write_bytes(b"\xff\xfe")
    assert main(["data", "build", "text", "--out", "tokens", "--json"]) == 0
    out, told = capsys.readouterr()
    found = json.loads(out)
    (output,) = found["outputs"]
    assert (output["documents"], output["tokens"], found["vocab_size"]) == (1, 6, 257)
    assert "text/b.md:1: not UTF-8" in told and "left out in all: 1 (not UTF-8)" in told
    assert all((folder / f"tokens{suffix}").exists() for suffix in (".bin", ".idx", ".json"))
    assert main(["data", "build", "text/a.md", "--out", "tokens"]) == 0
    assert capsys.readouterr().out.startswith("tokens: 1 documents, 6 tokens, a vocabulary of 257, sha256 ")
