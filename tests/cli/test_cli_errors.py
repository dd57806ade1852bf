"""Wrong inputs that need no cluster: the exit code and the one sentence of each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from live import cluster_of
from myriad.cli import ps
from myriad.cli.main import main

JOB = "name: job\nnodes: 1\ncommand: 'true'\n"
MODEL = """
name: llama
nodes: {nodes}
model: {{layers: 4, dim: 64, heads: {heads}, kv_heads: 4, ffn_dim: 128, vocab_size: 512}}
layout: {{tp: {tp}, dp_shard: 2}}
data: {{path: tokens, sequence_length: 64, global_batch: 8}}
optimizer: {{steps: 10, learning_rate: 1e-3}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a job and a cluster in it, and a state where nothing runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MYRIAD_STATE", str(tmp_path / "state"))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster_of(4, accelerators=2)))
    return tmp_path


NO_CLUSTER = 'no cluster is running for state {}/state; start one with "myriad up --cluster cluster.yaml"'

STORIES: list[tuple[str, int, str]] = [
    ("sumbit job.yaml", 2, "No such command 'sumbit'. Did you mean 'submit'? see \"myriad --help\""),
    ("ps --jsn", 2, 'No such option: --jsn (Possible options: --json); see "myriad ps --help"'),
    ("submit", 2, "Missing argument 'FILE'; see \"myriad submit --help\""),
    ("data", 2, 'Missing command; see "myriad data --help"'),
    ("up --port http", 2, "see \"myriad up --help\""),
    ("inject explode n1", 2, "see \"myriad inject --help\""),
    ("submit none.yaml", 2, "none.yaml does not exist; give the path of a YAML file"),
    ("submit .", 2, ". cannot be read (Is a directory); give the path of a YAML file"),
    ("events -f --json", 2, "--json prints one document and so cannot follow; leave out --follow"),
    ("up", 2, 'there is no cluster in state {}/state yet; give its file: "myriad up --cluster cluster.yaml"'),
    ("up --cluster none.yaml", 2, "none.yaml does not exist; give the path of a YAML file"),
    ("up --cluster job.yaml", 2, "job.yaml: "),
    ("run job.yaml --cluster none.yaml", 2, "none.yaml does not exist; give the path of a YAML file"),
    ("plan job.yaml --cluster cluster.yaml", 2, "model"),
    ("data build nothing --out tokens", 2, "nothing does not exist; give files or folders of text"),
    ("data build . --out tokens --vocab-size 0", 2, "see \"myriad data build --help\""),
    *((command, 5, NO_CLUSTER) for command in (
        "ps", "show j1", "why j1", "logs j1", "logs -f j1", "events", "nodes", "report j1", "cancel j1",
        "drain n1", "undrain n1", "inject kill-node n1", "down", "submit job.yaml", "submit --wait job.yaml",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "sentence"), STORIES, ids=[story[0] for story in STORIES])
def test_wrong_inputs(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, sentence: str
) -> None:
    assert main(words.split()) == code
    out, told = capsys.readouterr()
    assert sentence.format(folder) in told
    assert told.count("\n") == 1 and out == ""
    assert not (folder / "state").exists()


JOB_STORIES = [
    ("an unknown key", JOB + "nods: 2\n", 'job.yaml: unknown key "nods"; did you mean "nodes"?'),
    ("a duplicate key", JOB + "name: again\n", "job.yaml line 4: the key \"name\" is there twice, first in line 1"),
    ("heads that do not divide", MODEL.format(nodes=2, heads=8, tp=3), "job.yaml: model.heads 8 does not divide by layout.tp 3; "),
    ("not YAML", "name: [", "job.yaml line 1: "),
    ("not text", "\0", "job.yaml: the character U+0000"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["submit job.yaml", "run job.yaml --cluster cluster.yaml"])
@pytest.mark.parametrize(("case", "text", "sentence"), JOB_STORIES, ids=[s[0] for s in JOB_STORIES])
def test_a_wrong_job_is_refused_before_anything_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, case: str, text: str, sentence: str
) -> None:
    (folder / "job.yaml").write_text(text)
    assert main(command.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(sentence) and told.count("\n") == 1


def test_a_layout_that_does_not_cover_the_workers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(MODEL.format(nodes=3, heads=4, tp=2))
    assert main(["run", "job.yaml", "--cluster", "cluster.yaml"]) == 2
    told = capsys.readouterr().err
    assert "= 4 ranks, but 3 nodes x 2 workers" in told and told.count("\n") == 1


def test_a_state_with_another_cluster_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = folder / "state"
    state.mkdir()
    (state / "cluster.yaml").write_text(json.dumps(cluster_of(3)))
    assert main(["up", "--cluster", "cluster.yaml"]) == 4
    assert capsys.readouterr().err.startswith(f"state {state} holds another cluster than cluster.yaml; ")
    assert [file.name for file in state.iterdir()] == ["cluster.yaml"]


def test_a_state_that_cannot_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--cluster", "cluster.yaml", "--state", "job.yaml/state"]) == 1
    assert "cannot be made (Not a directory); give another with --state" in capsys.readouterr().err


def test_a_stale_address_is_no_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that was killed leaves its file; nobody listens there, or something else does."""
    state = folder / "state"
    state.mkdir()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        (state / "server.json").write_text(json.dumps({"url": url, "token": "t", "pid": 1}))
        assert main(["ps"]) == 5
    assert capsys.readouterr().err == NO_CLUSTER.format(folder) + "\n"


def test_a_bug_is_one_line_and_a_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("myriad.cli.client.Client.get", broken)
    assert main(["ps"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("myriad failed (ZeroDivisionError: oops); this is a bug, its traceback is in ")
    assert told.count("\n") == 1
    log = Path(told.rpartition(" is in ")[2].strip()).read_text()
    assert "Traceback" in log and ps.__file__ in log
    monkeypatch.setenv("MYRIAD_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["ps"])


def test_a_reader_that_leaves_is_no_error_to_tell(tmp_path: Path) -> None:
    command = f"{sys.executable} -m myriad.cli.main completion zsh | true"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stderr == ""
