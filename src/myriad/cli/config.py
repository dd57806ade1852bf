"""``myriad config show``: the settings in force and where each comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from myriad.cli.options import Json, Port, State

Origin = Annotated[bool, typer.Option("--origin", help="Print the source of each value too.")]


def group() -> typer.Typer:
    app = typer.Typer(help="The settings of this command.", rich_markup_mode=None)
    app.callback()(_group)
    app.command("show")(show)
    return app


def _group() -> None:
    """The settings of this command."""


def show(origin: Origin = False, state: State = None, port: Port = None, json: Json = False) -> None:
    """Print the settings in force: flag, MYRIAD_* variable, ./myriad.toml, user file, site file or default."""
    from myriad.cli import settings
    from myriad.cli.output import document, table

    found = settings.load(state, port)
    values = {"state": str(found.state), "port": found.port}
    if json:
        document({key: {"value": value, "origin": found.origins[key]} for key, value in values.items()})
    elif origin:
        table(("SETTING", "VALUE", "ORIGIN"), [(key, values[key], found.origins[key]) for key in values])
    else:
        table(("SETTING", "VALUE"), values.items())
