"""``myriad completion SHELL``: the script that completes commands, options, jobs and nodes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


Name = Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]


def completion(shell: Name) -> None:
    """Print a shell's completion script.

    For example: source <(myriad completion bash)
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from myriad.cli.output import say

    say(get_completion_script(prog_name="myriad", complete_var="_MYRIAD_COMPLETE", shell=shell.value))
