"""``myriad version``: which Myriad this is."""

from __future__ import annotations

from myriad.cli.options import Json


def version(json: Json = False) -> None:
    """Print the version."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from myriad import __version__
    from myriad.cli.output import document, say

    try:
        torch: str | None = installed("torch")
    except PackageNotFoundError:
        torch = None
    if json:
        document({"myriad": __version__, "python": platform.python_version(), "torch": torch})
    else:
        say(f"myriad {__version__} (Python {platform.python_version()}, torch {torch or 'not installed'})")
