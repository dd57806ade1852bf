"""The wheel in an environment of its own: what is in it, what it pulls in, and that it works without torch.

Needs a package index, as every installation does. Takes about 40 s on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import write

from live import cluster_of
from myriad import __version__

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0  # of any one step; downloading is the longest
HEAVY = ("torch", "numpy", "fastapi")

# Runs one command as the program does, then says on its last line which of HEAVY were imported.
SPY = f"""
import sys
import myriad
from myriad.cli.main import main
code = main(sys.argv[1:])
print(*sorted(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and nothing but what the wheel asked for."""

    wheel: Path
    home: Path

    def run(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        program, *arguments = map(str, words)
        return run([str(self.home / "bin" / program), *arguments], cwd)

    def names(self) -> set[str]:
        listed = self.run("python", "-m", "pip", "list", "--format=freeze", cwd=self.home)
        assert listed.returncode == 0, listed
        return {line.split("==")[0].lower() for line in listed.stdout.split()}


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without a trace of the environment and the source tree that this test runs in."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return subprocess.run(
        words,
        cwd=cwd,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        folder,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("myriad_cluster-*.whl")
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    result = Installed(wheel, folder / "venv")
    constraints = ROOT / "constraints.txt"
    done = result.run(
        "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints, wheel, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return result


@pytest.mark.slow
def test_it_holds_the_package_and_its_licence_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"myriad", f"myriad_cluster-{__version__}.dist-info"}
    inside = {name for name in names if name.startswith("myriad/")}
    source = ROOT / "src"
    assert inside == {
        str(file.relative_to(source))
        for file in (source / "myriad").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_it_pulls_no_torch(installed: Installed) -> None:
    names = installed.names()
    assert "myriad-cluster" in names and "fastapi" in names
    assert not names & {"torch", "tokenizers", "pytest", "ruff", "mypy"}, names


@dataclass(frozen=True)
class Story:
    words: tuple[str, ...]
    code: int
    out: str = ""
    err: str = ""


STORIES = [
    Story(("--help",), 0, out="Train on a cluster of accelerators as if it were one machine."),
    Story(("version",), 0, out=f"myriad {__version__} (Python "),
    Story(("ps", "--state", "nowhere"), 5, err="nowhere"),
]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.words[0])
def test_light_commands_import_nothing_heavy(story: Story, installed: Installed, tmp_path: Path) -> None:
    done = installed.run("python", "-W", "error", "-c", SPY, *story.words, cwd=tmp_path)
    *said, heavy = done.stderr.splitlines()
    assert (done.returncode, heavy) == (story.code, ""), done
    assert story.out in done.stdout and story.err in "\n".join(said), done
    assert len(said) == (1 if story.err else 0), "an error is one sentence"
    program = installed.run("myriad", *story.words, cwd=tmp_path)
    assert (program.returncode, program.stdout) == (story.code, done.stdout), program


@pytest.mark.slow
def test_a_command_runs_on_a_cluster(installed: Installed, tmp_path: Path) -> None:
    write(tmp_path / "cluster.yaml", cluster_of(nodes=2))
    command = "echo rank $RANK of $WORLD_SIZE"
    write(tmp_path / "job.yaml", {"name": "hello", "nodes": 2, "command": command})
    state = ("--state", "state")
    up = installed.run("myriad", "up", "--cluster", "cluster.yaml", "--port", 0, *state, cwd=tmp_path)
    try:
        assert up.returncode == 0, up.stderr
        done = installed.run("myriad", "submit", "job.yaml", "--wait", *state, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        logs = installed.run("myriad", "logs", "hello", *state, cwd=tmp_path)
        assert all(f"rank {rank} of 2" in logs.stdout for rank in (0, 1)), logs
        report = installed.run("myriad", "report", "hello", *state, cwd=tmp_path)
        assert report.returncode == 0 and "running_unattributed" in report.stdout, report
    finally:
        down = installed.run("myriad", "down", "--cancel-jobs", *state, cwd=tmp_path)
    assert down.returncode == 0, down.stderr
