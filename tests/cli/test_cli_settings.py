"""Where a setting comes from: the first of flag, environment, project, user, site and default that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from myriad.cli import settings
from myriad.cli.main import main


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project folder to be in, and a site file of this test's own."""
    for name in ("project", "site", "xdg-config/myriad"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(settings, "SITE_FILE", tmp_path / "site" / "config.toml")


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source in turn, from the weakest to the strongest, wins over those before it."""
    project, user, site = (
        tmp_path / "project" / "myriad.toml",
        tmp_path / "xdg-config" / "myriad" / "config.toml",
        tmp_path / "site" / "config.toml",
    )
    found = settings.load()
    assert (found.origins["port"], found.port, found.state) == (
        "default",
        0,
        tmp_path / "xdg-state" / "myriad",
    )
    for port, file in ((1001, site), (1002, user), (1003, project)):
        file.write_text(f'port = {port}\nstate = "s{port}"\n')
        found = settings.load()
        assert (found.port, found.origins["port"]) == (port, str(file))
        assert (found.state, found.origins["state"]) == (file.parent / f"s{port}", str(file))
    monkeypatch.setenv("MYRIAD_PORT", "1004")
    monkeypatch.setenv("MYRIAD_STATE", "~/here")
    found = settings.load()
    assert (found.port, found.origins["port"]) == (1004, "environment")
    assert found.state == Path("~/here").expanduser()
    found = settings.load(Path("flagged"), 1005)
    assert (found.port, found.state) == (1005, tmp_path / "project" / "flagged")
    assert found.origins == {"state": "flag", "port": "flag"}


def test_each_setting_has_its_own_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project" / "myriad.toml").write_text("port = 7000\n")
    assert main(["config", "show", "--state", "/s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "state": {"value": "/s", "origin": "flag"},
        "port": {"value": 7000, "origin": str(tmp_path / "project" / "myriad.toml")},
    }
    assert main(["config", "show", "--origin", "--state", "/s"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["SETTING", "VALUE", "ORIGIN"], ["state", "/s", "flag"]]


BAD_FILES = [
    ("prot = 1", 'myriad.toml: unknown key "prot"; the keys are state and port'),
    ("port = 70000", "myriad.toml: port 70000 is not a port; give a number from 0 (any free one) to 65535"),
    ("port = true", "myriad.toml: port True is not a port; give a number from 0 (any free one) to 65535"),
    ("state = 3", "myriad.toml: state is not a path; give the state directory"),
    ("port = ", "mend or remove it"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (tmp_path / "project" / "myriad.toml").write_text(text)
    assert main(["ps"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.strip().endswith(sentence)


def test_a_bad_environment_variable_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MYRIAD_PORT", "http")
    assert main(["ps"]) == 2
    assert capsys.readouterr().err == (
        "environment: port http is not a port; give a number from 0 (any free one) to 65535\n"
    )
