"""What the reading commands print of a job that lost a node, and that --json is one document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import World

import leaks
from myriad.cli.main import main
from myriad.runtime.paths import StateDir

AWKWARD = "a b/c ä%20?why"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A served state: j1 has recovered, j2 has ended, j3 waits and has an awkward name. No controller runs."""
    root = tmp_path_factory.mktemp("views") / "state"
    with World(root, nodes=5) as world:
        world.train_and_lose_a_node()
        done = world.submit({"name": "done", "nodes": 1, "command": "true"})
        world.member(done, "n3", 1, "store", store_port=1236)
        world.member(done, "n3", 1, "started", store_port=1236, pids={0: 6000}, phases={"fork": 0.1})
        world.member(done, "n3", 1, "exited", store_port=1236)
        world.member(done, "n3", 1, "stopped")
        world.submit({"name": AWKWARD, "nodes": 9, "command": "true"})
        logs = world.state_dir.job_dir(done) / "logs"
        logs.mkdir(parents=True)
        (logs / "rank-00000.log").write_bytes(b"one\ntwo\nthree\n\xff\n")
    command = [sys.executable, "-m", "myriad.server", "--state", str(root)]
    with subprocess.Popen(command) as process:
        assert leaks.wait_until(StateDir(root).server_file.exists, 60.0)
        yield root
        process.terminate()


@pytest.fixture(autouse=True)
def at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYRIAD_STATE", str(root))


def lines(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    """What a command prints, with runs of blanks and what depends on today's date taken out."""
    assert main(list(words)) == code, capsys.readouterr()
    shown = re.sub(r"\d+d \d+h", "TIME", capsys.readouterr().out)
    return [re.sub(" +", " ", line) for line in shown.splitlines()]


def test_ps(capsys: pytest.CaptureFixture[str]) -> None:
    header = "JOB NAME STATUS REASON NODES STEP LOSS RUN RESTARTS"
    running = "j1 llama RUNNING progress n0, n2 4/6 4.6 TIME 1"
    waiting = f"j3 {AWKWARD} PENDING resources (9) - - - 0"
    done = "j2 done SUCCEEDED completed (1) - - 4 s 0"
    assert lines(capsys, "ps") == [header, running, waiting]
    assert lines(capsys, "ps", "-a") == [header, running, done, waiting]


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "show", "llama") == [
        "j1 llama RUNNING (progress)",
        "detail: running on 2 nodes, 2 workers",
        "submitted: 2023-11-14T22:13:28.000Z, waited 0 s",
        "run time: TIME",
        "progress: step 4 of 6, loss 4.6000, 32 tokens/s",
        "checkpoint: step 2 is durable",
        "saved to memory: every step, until one has been measured",
        "saved to peer: every 10 steps, until one has been measured",
        "saved to durable: every 10 steps, until one has been measured",
        "copies: of 2 nodes 0 have theirs in another leaf, 0 of them outside their groups",
        "restarts: 1",
        "lost: n1",
        "",
        "NODE RANKS PIDS STATE STEP",
        "n0 0 5000 started 3",
        "n2 1 5001 started 3",
        "",
        "GENERATION BEGUN START FROM STEP TIERS ENDED BY",
        "1 2023-11-14T22:13:28.000Z 3 s - 2 none node n1 was lost (its agent died)",
        "2 2023-11-14T22:13:34.000Z 4 s 2 1 memory, 1 durable -",
    ]


@pytest.mark.parametrize("ref", ["j3", AWKWARD])
def test_why(capsys: pytest.CaptureFixture[str], ref: str) -> None:
    want = 'j3 is PENDING (resources, blocked by a limit): needs 9 nodes but cluster "test" has 5; 4 more are needed'
    assert lines(capsys, "why", ref) == [want]


def test_logs(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["logs", "done"]) == 0
    assert capfdbinary.readouterr().out == (b"[rank 0] one\n[rank 0] two\n[rank 0] three\n[rank 0] \xff\n")
    assert main(["logs", "done", "--rank", "0", "--tail", "2"]) == 0
    assert capfdbinary.readouterr().out == b"three\n\xff\n"
    assert main(["logs", "-f", "done", "--tail", "1"]) == 0
    assert capfdbinary.readouterr().out == b"[rank 0] \xff\n"
    assert main(["logs", "j3"]) == 0
    out, told = capfdbinary.readouterr()
    assert (out, told.decode()) == (
        b"",
        'j3 has written nothing yet (PENDING: needs 9 nodes but cluster "test" has 5; 4 more are needed)\n',
    )


def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys, "events", "j1")
    assert "2023-11-14T22:13:34.000Z j1: node n1 was lost (its agent died); fencing generation 1" in shown
    assert lines(capsys, "events", "done", "-f") == lines(capsys, "events", "done")
    assert lines(capsys, "events", "--node", "n1")[-1].endswith("n1: down (its agent died)")


def test_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys, "nodes")
    assert shown[0] == "NODE STATE JOB TYPE ACCELERATORS CPUS MEMORY LEAF RACK AGENT FOR REASON"
    assert shown[1] == "n0 busy j1 small 1 1 1 GiB leaf0 r0 connected TIME -"
    assert shown[2] == "n1 down - small 1 1 1 GiB leaf0 r0 away TIME its agent died"


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = lines(capsys, "report", "llama", "--reference", "j1")
    assert shown[0].startswith("j1 llama RUNNING, TIME of wall time")
    assert "every loss equals the reference run's, bit for bit" in shown
    assert any(line.startswith("compute not predicted 3.20") for line in shown)
    assert "generation 1: node n1 was lost (its agent died); n2 takes over from n1" in shown
    page = tmp_path / "report.html"
    assert lines(capsys, "report", "done", "--html", str(page)) == []
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", "done", "--html", str(tmp_path / "none" / "report.html")]) == 1
    assert "cannot be written (No such file or directory); give another file" in capsys.readouterr().err


JSON_COMMANDS = [
    "ps", "ps -a", "show j1", "why j1", "events", "events j2 --node n1", "nodes", "report j1", "report j2",
    "config show", "version",
]  # fmt: skip


@pytest.mark.parametrize("words", JSON_COMMANDS)
def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main([*words.split(), "--json"]) == 0
    out, told = capsys.readouterr()
    assert isinstance(json.loads(out), dict) and told == ""


REFUSED = [
    ("show none", 3, 'there is no job "none"; "myriad ps -a" lists all jobs'),
    ("events --node n9", 3, 'there is no node "n9"; "myriad nodes" lists all nodes'),
    ("logs j2 --rank 1", 3, "j2 has ranks 0 to 0; there is no rank 1"),
    ("report j1 --reference none", 3, 'there is no job "none"; "myriad ps -a" lists all jobs'),
    ("cancel j1", 5, "no cluster is running for state "),
    ("drain n1", 5, "no cluster is running for state "),
]


@pytest.mark.parametrize(("words", "code", "sentence"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refusals(capsys: pytest.CaptureFixture[str], words: str, code: int, sentence: str) -> None:
    assert main(words.split()) == code
    out, told = capsys.readouterr()
    assert told.startswith(sentence) and told.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("words", "want"), [("myriad why l", ["llama"]), ("myriad drain n", [f"n{i}" for i in range(5)])]
)
def test_the_shell_completes_jobs_and_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, want: list[Any]
) -> None:
    monkeypatch.setenv("_MYRIAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == want
