"""The production controller process, except that it dies at its k-th journal commit.

``python crash_controller.py before|after K --state DIR``: SIGKILL to itself just before, or just after, the
K-th commit of this process (0: never). The number of commits so far is in the file ``commits`` of the state.
Nothing else differs from ``python -m myriad.engines``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from myriad.engines import __main__ as engines
from myriad.runtime import loop
from myriad.runtime.paths import StateDir
from myriad.runtime.store import Journal


class CrashingJournal(Journal):
    """Counts commits and kills the process at one of them."""

    moment = ""
    at = 0

    def __init__(self, state_dir: StateDir) -> None:
        super().__init__(state_dir)
        self._count = 0
        self._count_file = state_dir.root / "commits"

    def append(self, entries: Iterable[tuple[float, Any, Any, Any]]) -> None:
        self._count += 1
        self._count_file.write_text(str(self._count))
        if self.moment == "before" and self._count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(entries)
        if self.moment == "after" and self._count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    CrashingJournal.moment, CrashingJournal.at = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    loop.Journal = CrashingJournal  # type: ignore[attr-defined]
    return engines.main()


if __name__ == "__main__":
    sys.exit(main())
