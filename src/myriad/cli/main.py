"""The command ``myriad``: the tree of commands, and the one place where errors become exit codes.

Commands import what they need when they run, so ``myriad --help`` loads typer and these small files only (about
0.15 s). Whatever a user can cause ends as one sentence on stderr; what only a bug can cause is written to a log
file and told in one line (``MYRIAD_DEBUG=1`` shows it at once).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from myriad.cli import (
    cancel,
    checkpoint,
    completion,
    config,
    data,
    down,
    drain,
    events,
    inject,
    logs,
    nodes,
    plan,
    ps,
    report,
    run,
    show,
    simulate,
    submit,
    undrain,
    up,
    version,
    why,
)
from myriad.cli.errors import CommandError, Exit, Terminated
from myriad.cli.output import talk

EPILOG = (
    "For those who know Slurm: sbatch is submit, squeue is ps, scancel is cancel, sinfo is nodes, "
    "scontrol show job is show, sacct is ps -a."
)


def make_app() -> typer.Typer:
    """The tree of commands, in the order of --help."""
    app = typer.Typer(
        name="myriad",
        help="Train on a cluster of accelerators as if it were one machine.",
        epilog=EPILOG,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, command in (
        ("up", up.up),
        ("down", down.down),
        ("run", run.run),
        ("submit", submit.submit),
        ("ps", ps.ps),
        ("show", show.show),
        ("why", why.why),
        ("logs", logs.logs),
        ("events", events.events),
        ("report", report.report),
        ("cancel", cancel.cancel),
        ("nodes", nodes.nodes),
        ("drain", drain.drain),
        ("undrain", undrain.undrain),
        ("inject", inject.inject),
        ("plan", plan.plan),
        ("simulate", simulate.simulate),
        ("completion", completion.completion),
        ("version", version.version),
    ):
        app.command(name)(command)
    for name, group in (
        ("data", data.group()),
        ("checkpoint", checkpoint.group()),
        ("config", config.group()),
    ):
        app.add_typer(group, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is escaped rather than fatal.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    try:
        code = _invoke(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left (`myriad ps | head -1`); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED
    except Terminated:
        return Exit.TERMINATED
    except Exception as error:  # noqa: BLE001 (the last place where it can become a sentence)
        message, code = _told(error)
        talk(message)
        return code


def _invoke(words: list[str]) -> int:
    from typer.main import get_command

    if sys.platform != "linux":
        raise CommandError(
            f"Myriad runs on Linux only, and this is {sys.platform}; use a Linux machine or container"
        )
    if "_MYRIAD_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    result = get_command(make_app()).main(words or ["--help"], prog_name="myriad", standalone_mode=False)
    return result if isinstance(result, int) else Exit.OK


def _told(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code for what went wrong."""
    if isinstance(error, CommandError):
        return str(error), error.code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "myriad"
        message = error.format_message().rstrip(".")
        return f'{message}{"" if message.endswith("?") else ";"} see "{command} --help"', Exit.USAGE
    if _is_users(error):
        return str(error), Exit.USAGE
    if os.environ.get("MYRIAD_DEBUG") == "1":
        raise error
    return _logged(error), Exit.FAILED


def _is_users(error: Exception) -> bool:
    """Whether it is the sentence about a file of the user's; their classes are loaded only if they were raised."""
    from myriad.spec.errors import SpecError

    datasets = sys.modules.get("myriad.storage.datasets.index")
    return isinstance(error, (SpecError, *([datasets.DatasetError] if datasets else [])))


def _logged(error: Exception) -> str:
    """Append the traceback to the user's error log; the line that says where."""
    import datetime
    import traceback
    from pathlib import Path

    import platformdirs

    text = "".join(traceback.format_exception(error))
    file = Path(platformdirs.user_log_dir("myriad")) / "errors.log"
    summary = f"myriad failed ({type(error).__name__}: {' '.join(str(error).split())})"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.write(f"{datetime.datetime.now().isoformat()} {sys.argv}\n{text}\n")
    except OSError as problem:
        return f"{summary}; its traceback could not be written to {file} ({problem.strerror}), MYRIAD_DEBUG=1 shows it"
    return f"{summary}; this is a bug, its traceback is in {file}"


if __name__ == "__main__":
    sys.exit(main())
