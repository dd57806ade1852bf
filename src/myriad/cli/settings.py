"""Where the settings come from: flag, environment, project file, user file, site file, default; first found wins.

Two settings only: ``state`` (the state directory) and ``port`` (of the API, 0 for any free one). Each value
remembers its source, which ``myriad config show --origin`` prints. Paths in a file count from that file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.cli.errors import CommandError, Exit

KEYS = ("state", "port")
PROJECT_FILE = "myriad.toml"
SITE_FILE = Path("/etc/myriad/config.toml")
DEFAULT_PORT = 0  # any free one: several clusters can share a machine
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Layer:
    """One source: its name for people, its values, and the folder its paths count from."""

    origin: str
    values: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force, and for each the source that gave it."""

    state: Path
    port: int
    origins: Mapping[str, str]


def load(state: Path | None = None, port: int | None = None) -> Settings:
    """The settings under the given flags; CommandError (usage) for a value that cannot be used."""
    flags = {"state": state, "port": port}
    layers = list(_layers({key: value for key, value in flags.items() if value is not None}))
    found = {key: next(layer for layer in layers if key in layer.values) for key in KEYS}
    return Settings(
        state=_path(found["state"]),
        port=_port(found["port"]),
        origins={key: layer.origin for key, layer in found.items()},
    )


def _layers(flags: Mapping[str, Any]) -> Iterator[Layer]:
    import platformdirs

    here = Path.cwd()
    yield Layer("flag", flags, here)
    named = {key: f"MYRIAD_{key.upper()}" for key in KEYS}
    yield Layer(
        "environment", {key: os.environ[name] for key, name in named.items() if os.environ.get(name)}, here
    )
    for file in (
        here / PROJECT_FILE,
        Path(platformdirs.user_config_dir("myriad")) / "config.toml",
        SITE_FILE,
    ):
        yield Layer(str(file), _read(file), file.parent)
    yield Layer("default", {"state": platformdirs.user_state_dir("myriad"), "port": DEFAULT_PORT}, here)


def _read(file: Path) -> dict[str, Any]:
    """The settings of a file; none when there is no file."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{file} cannot be read ({error}); mend or remove it", Exit.USAGE) from None
    unknown = next((key for key in values if key not in KEYS), None)
    if unknown is not None:
        raise CommandError(f'{file}: unknown key "{unknown}"; the keys are {" and ".join(KEYS)}', Exit.USAGE)
    return values


def _path(layer: Layer) -> Path:
    value = layer.values["state"]
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise CommandError(f"{layer.origin}: state is not a path; give the state directory", Exit.USAGE)
    return Path(os.path.abspath(layer.folder / Path(value).expanduser()))


def _port(layer: Layer) -> int:
    value = layer.values["port"]
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PORT:
        raise CommandError(
            f"{layer.origin}: port {value} is not a port; give a number from 0 (any free one) to {MAX_PORT}",
            Exit.USAGE,
        )
    return value
