"""The tree of commands is a promise, and asking for help is quick because nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from myriad.cli.main import main, make_app

GOLDEN = Path(__file__).with_name("golden_tree.txt")
HEAVY = ("torch", "fastapi", "starlette", "uvicorn", "numpy", "sqlite3")


def tree(command: Any, path: str = "myriad") -> Iterator[str]:
    """One line for each command and, below it, each argument and option."""
    children = getattr(command, "commands", {})
    if not children:
        yield path
    for parameter in command.params:
        if parameter.name != "help":
            kind = "argument" if parameter.param_type_name == "argument" else "option"
            spelled = parameter.metavar if kind == "argument" else "/".join(parameter.opts)
            yield f"  {kind} {spelled}{' (required)' if parameter.required else ''}"
    for name, child in children.items():
        yield from tree(child, f"{path} {name}")


def test_the_tree_of_commands_is_the_golden_one() -> None:
    """After a change on purpose: write what this prints to golden_tree.txt."""
    found = "\n".join(tree(get_command(make_app()))) + "\n"
    assert found == GOLDEN.read_text(), found


@pytest.mark.parametrize(
    "words", [["--help"], ["ps"], ["version"], ["config", "show"], ["completion", "bash"]], ids=" ".join
)
def test_light_commands_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, json\n"
        "from myriad.cli.main import main\n"
        f"main({words!r})\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_importing_myriad_imports_nothing_heavy() -> None:
    code = f"import sys, myriad; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for line in tree(get_command(make_app())):
        if not line.startswith(" "):
            assert main([*line.split()[1:], "--help"]) == 0
            shown = capsys.readouterr().out
            assert "Usage: " in shown
            assert all(
                option.split("  ", 1)[1:] for option in shown.partition("Options:")[2].splitlines() if option
            )


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "sbatch is submit" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_MYRIAD_COMPLETE" in capsys.readouterr().out


def test_the_shell_completes_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MYRIAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "myriad und")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["undrain"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["myriad"]
