"""What a user can get wrong on a live cluster, and what they are then told: text and exit code of each.

One cluster of two nodes with two accelerators each serves all stories; what needs no cluster is in
``tests/cli/test_cli_errors.py``. Every story ends with an idle cluster, which is itself checked.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import Done, cluster_up, myriad, write

from live import cluster_of
from myriad.cluster.state import NodeState
from myriad.control.records import NodeRecord
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader

pytestmark = pytest.mark.slow

MODEL = {
    "name": "model",
    "nodes": 1,
    "workers_per_node": 1,
    "model": {"layers": 2, "dim": 16, "heads": 2, "kv_heads": 1, "ffn_dim": 32, "vocab_size": 258},
    "data": {"path": "text", "sequence_length": 16, "global_batch": 2},
    "optimizer": {"steps": 4, "learning_rate": 1e-3},
}


@dataclass(frozen=True)
class Site:
    """The cluster of this module: where its files are, and its command line."""

    folder: Path
    state: Path

    def run(self, command: str, *words: object) -> Done:
        return myriad(command, "--state", self.state, *words, cwd=self.folder)

    def submit(self, spec: dict[str, Any], *options: str) -> Done:
        return self.run("submit", write(self.folder / "job.yaml", spec), *options)

    def show(self, job: str) -> dict[str, Any]:
        view: dict[str, Any] = self.run("show", job, "--json").json()
        return view


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "story.txt").write_text("It was a dark and stormy night. " * 64)
    with cluster_up(folder, cluster_of(nodes=2, accelerators=2, heartbeat_s=0.2)) as state:
        built = myriad("data", "build", "story.txt", "--out", "text", cwd=folder)
        assert built.code == 0, built
        site = Site(folder, state)
        # The stories' job without a mistake; from here on both nodes hold a warm template process, as it should be.
        done = site.submit({**MODEL, "nodes": 2, "layout": {"dp_replicate": 2}}, "--wait")
        assert done.code == 0, done
        yield site


@pytest.fixture(autouse=True)
def idle_afterwards(site: Site) -> Iterator[None]:
    """No story leaves a job or a busy node behind."""
    yield
    with StateReader(StateDir(site.state)) as reader:
        nodes = reader.records(NodeRecord).values()
        assert {node.state for node in nodes} == {NodeState.FREE}, nodes


def command(name: str, *words: str, nodes: int = 1, **keys: Any) -> dict[str, Any]:
    return {"name": name, "nodes": nodes, "workers_per_node": 1, "command": list(words), **keys}


# ------------------------------------------------------------ specification


@dataclass(frozen=True)
class Refusal:
    name: str
    change: dict[str, Any]
    sentence: str


REFUSALS = [
    Refusal(
        "an unknown key", {"optimiser": {}}, 'job.yaml: unknown key "optimiser"; did you mean "optimizer"?'
    ),
    Refusal(
        "tp that does not divide the heads",
        {"layout": {"tp": 3}, "workers_per_node": 3},
        "job.yaml: model.heads 2 does not divide by layout.tp 3; change one of them (to layout.tp 2?)",
    ),
    Refusal(
        "pp that does not divide the layers",
        {"model": {**MODEL["model"], "layers": 3}, "layout": {"pp": 2, "microbatches": 2}},
        "job.yaml: model.layers 3 does not divide by layout.pp 2; change one of them (to layout.pp 1, 3?)",
    ),
    Refusal(
        "a layout that is not the world",
        {"layout": {"dp_replicate": 2}},
        'job "model" has the layout dp_replicate 2 = 2 ranks, but 1 nodes x 1 workers (node type "small") are 1; '
        "change the layout or nodes",
    ),
    Refusal(
        "more workers than accelerators",
        {"layout": {"dp_replicate": 4}, "data": {**MODEL["data"], "global_batch": 4}, "workers_per_node": 4},
        'job "model" wants 4 workers on a node, but node type "small" has 2 accelerators and a model\'s worker '
        "needs one; lower workers_per_node",
    ),
    Refusal(
        "a node type that is not there",
        {"node_type": "smal"},
        'job "model" asks for the unknown node type "smal"; did you mean "small"?',
    ),
]


@pytest.mark.parametrize("story", REFUSALS, ids=lambda story: story.name)
def test_refused_at_submission(site: Site, story: Refusal) -> None:
    done = site.submit({**MODEL, **story.change})
    assert (done.code, done.out) == (2, "")
    assert done.err.removeprefix(f"{site.folder}/") == story.sentence + "\n"


# ------------------------------------------------------------ more nodes than exist


NEEDS_THREE = command("big", "true", nodes=3)
DEFICIT = 'needs 3 nodes but cluster "test" has 2; 1 more is needed'


def test_more_nodes_than_exist_is_accepted_and_waits(site: Site) -> None:
    done = site.submit(NEEDS_THREE)
    assert done.code == 0
    job = done.out.strip()
    try:
        view = site.show(job)
        assert (view["status"], view["reason"]) == ("PENDING", "resources")
        assert view["detail"] == DEFICIT
        why = site.run("why", job)
        assert (why.code, why.out) == (0, f"{job} is PENDING (resources, blocked by a limit): {DEFICIT}\n")
    finally:
        site.run("cancel", job)
    assert site.show(job)["status"] == "CANCELLED"


def test_more_nodes_than_exist_with_wait_and_run(site: Site) -> None:
    waited = site.submit(NEEDS_THREE, "--wait")
    file, cluster = site.folder / "job.yaml", site.folder / "cluster.yaml"
    ran = myriad("run", file, "--cluster", cluster, cwd=site.folder)
    for done in (waited, ran):
        assert (done.code, done.out) == (1, "")
        assert done.err.splitlines()[-1].endswith(f"was cancelled, since it cannot start: {DEFICIT}"), (
            done.err
        )


# ------------------------------------------------------------ data


def cut(prefix: Path) -> None:
    """Take the last half of the tokens away."""
    os.truncate(prefix.with_suffix(".bin"), prefix.with_suffix(".bin").stat().st_size // 2)


def delete_index(prefix: Path) -> None:
    prefix.with_suffix(".idx").unlink()


def spoil_index(prefix: Path) -> None:
    prefix.with_suffix(".idx").write_bytes(b"nonsense" * 8)


MAX_STARTS = 3  # twice in the same place, once in another: then it is the user's mistake


DATA_STORIES: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "truncated",
        cut,
        "broken.bin has 2049 bytes where its index says 4098: it is truncated or belongs to another",
    ),
    (
        "without its index",
        delete_index,
        "there is no data set at broken: broken.idx is missing; build it with",
    ),
    (
        "with a spoilt index",
        spoil_index,
        "broken.idx is no Megatron index: it begins with b'nonsensen'; give the",
    ),
]


def test_a_missing_dataset(site: Site) -> None:
    done = site.submit({**MODEL, "data": {**MODEL["data"], "path": "nowhere/text"}}, "--wait")
    assert_failed(
        done, "DatasetError: there is no data set at nowhere/text: nowhere/text.idx is missing; build it with"
    )


@pytest.mark.parametrize(("name", "harm", "sentence"), DATA_STORIES, ids=[story[0] for story in DATA_STORIES])
def test_a_broken_dataset(site: Site, name: str, harm: Callable[[Path], None], sentence: str) -> None:
    built = myriad("data", "build", "story.txt", "--out", "broken", cwd=site.folder)
    assert built.code == 0, built
    harm(site.folder / "broken")
    done = site.submit({**MODEL, "data": {**MODEL["data"], "path": "broken"}}, "--wait")
    assert_failed(done, f"DatasetError: {sentence}")


def assert_failed(done: Done, sentence: str) -> None:
    """The job has failed with that sentence in its detail, after trying both nodes and no more."""
    assert done.code == 1, done
    end = next(line for line in done.err.splitlines() if " FAILED: rank 0 on " in line)
    assert sentence in end, done.err
    assert done.err.count("fencing generation") <= MAX_STARTS, done.err


# ------------------------------------------------------------ checkpoint directory


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; skips where this process may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ro,size=1m", "is read-only: mount it writable or set checkpoint.directory to another one"),
        ("size=16k", "is full: free space there or set checkpoint.directory to a larger file system"),
    ],
    ids=["read-only", "full"],
)
def test_a_checkpoint_directory_that_cannot_be_written(
    site: Site, tmp_path: Path, options: str, words: str
) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    with tmpfs(tmp_path / "full", options) as folder:
        keeping = {"directory": str(folder), "every_steps": 2}
        done = site.submit({**MODEL, "checkpoint": keeping}, "--wait")
    assert_failed(done, f"CheckpointError: the checkpoint directory {folder} {words}")


# ------------------------------------------------------------ up


def test_a_second_up_on_the_same_state(site: Site) -> None:
    done = site.run("up", "--cluster", site.folder / "cluster.yaml")
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith(f"a cluster is already running on state {site.state} (controller process ")
    assert done.err.endswith('stop it with "myriad down", or give another --state\n')


def test_a_port_in_use(site: Site, tmp_path: Path) -> None:
    cluster = write(tmp_path / "cluster.yaml", cluster_of(nodes=1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = myriad("up", "--cluster", cluster, "--state", tmp_path / "s", "--port", port, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in done.err
    # Nothing of it is left running: the next up begins afresh (and the suite looks for processes).
    assert myriad("ps", "--state", tmp_path / "s", cwd=tmp_path).code == 5


# ------------------------------------------------------------ commands


@pytest.mark.parametrize("options", [("--wait",), ()], ids=["wait", "later"])
def test_a_command_that_is_not_found(site: Site, options: tuple[str, ...]) -> None:
    done = site.submit(command("lost", "pyhton", "train.py"), *options)
    if options:
        job = done.err.partition(":")[0]
        assert done.code == 127, done
        assert "command not found: pyhton; check its name and PATH on the nodes" in done.err
    else:
        job = done.out.strip()
        assert site.run("logs", "-f", job).code == 127
    view = site.show(job)
    assert (view["status"], view["exit_code"]) == ("FAILED", 127)
    assert "command not found: pyhton" in view["detail"] and view["restarts"] < MAX_STARTS


def test_a_script_that_exits_3_at_once(site: Site) -> None:
    lines = [f"line {i}" for i in range(1, 31)]
    done = site.submit(
        command("three", "/bin/sh", "-c", f"printf '%s\\n' {' '.join(map(repr, lines))}; exit 3"), "--wait"
    )
    assert done.code == 3, done
    assert "exited with code 3" in done.err
    told = done.err.splitlines()
    assert told[-1].endswith("line 30") and told[-10].endswith("line 21"), done.err
    view = site.show("three")
    assert (view["status"], view["reason"], view["exit_code"]) == ("FAILED", "user_error", 3)
    assert 1 <= view["restarts"] < MAX_STARTS


def test_a_working_directory_that_is_not_there(site: Site) -> None:
    done = site.submit(command("astray", "true", workdir="no/such/folder"), "--wait")
    assert done.code == 1, done
    assert "the working directory does not exist" in done.err


def test_a_time_limit_that_is_too_short(site: Site) -> None:
    done = site.submit(command("slow", "sleep", "60", time_limit="1s"), "--wait")
    assert done.code == 124, done
    assert site.show("slow")["status"] == "TIMEOUT"


# ------------------------------------------------------------ names and values


@pytest.mark.parametrize(
    "name", ["a/b/c", "two  words ", "größe-日本-🚀", "../../etc/x", "-f", "?q#f&x 100%2F"]
)
def test_names_that_mean_something_elsewhere(site: Site, name: str) -> None:
    """A name is a label: it never becomes a path, an option or a piece of an address."""
    before = {path.name for path in site.folder.iterdir()} | {"job.yaml"}
    done = site.submit(
        command(name, "/bin/sh", "-c", 'printf "%s\\n" "$MYRIAD_JOB_NAME"'), "--wait", "--json"
    )
    assert done.code == 0, done
    job = done.json()["id"]
    assert done.json()["name"] == name
    assert site.run("show", "--json", "--", name).json()["id"] == job
    assert site.run("logs", "--rank", 0, "--", name).out == f"{name}\n"
    assert site.run("report", job, "--html", site.folder / "report.html").code == 0
    new = {path.name for path in site.folder.iterdir()} - before
    assert new <= {"report.html"}, new


def test_environment_values_with_newlines_and_quotes(site: Site) -> None:
    values = {"LINES_OF": "one\ntwo\n\nfour\n", "QUOTES": "'\"$HOME`id`\\", "EMPTY": "", "Ümlaut": "日本"}
    show = f"import json, os; print(json.dumps({{k: os.environ[k] for k in {list(values)!r}}}))"
    done = site.submit(command("env", "python", "-c", show, env=values), "--wait")
    assert done.code == 0, done
    assert json.loads(site.run("logs", "env", "--rank", 0).out) == values


def test_environment_that_myriad_itself_sets(site: Site) -> None:
    done = site.submit(command("rank", "true", env={"RANK": "7"}))
    assert done.code == 2
    assert '"RANK" is set by Myriad for every worker; remove it or use another name' in done.err
