"""For all tests: a state of their own, and nothing may be left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
# Helper modules (live, world, harness, ...) are imported by name; appended, so that they shadow nothing.
for _folder in (_HERE, *sorted(p for p in _HERE.iterdir() if p.is_dir() and not p.name.startswith("_"))):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

import leaks

leaks.mark_this_run()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Run in the background: the programs under test would inherit that, and never hear an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread or a listening socket of its own."""
    before = leaks.Held.now()
    yield
    left = leaks.left_since(before)
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the state or the settings of the person who runs it."""
    for name in ("MYRIAD_STATE", "MYRIAD_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg-config"))


@pytest.fixture
def state_root(tmp_path: Path) -> Path:
    """Where a cluster of this test keeps its state."""
    return tmp_path / "state"
