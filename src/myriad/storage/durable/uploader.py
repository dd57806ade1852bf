"""The program that copies committed checkpoints to object storage, behind training.

    python -m myriad.storage.durable.uploader DIRECTORY URL KEEP

Method: level-triggered. It looks for the newest committed checkpoint below DIRECTORY, copies it if URL has no whole copy
of it, prunes the copies to KEEP, and looks again; so it skips to the newest when saves come faster than copies, and
needs no memory of its own after a kill. While it copies, ``.copying`` keeps pruning from the one it reads: local space is
bounded by one checkpoint more. It reads the marker, and so only what the controller has journaled as committed.

Standard output is one line of JSON for each thing done (:class:`Said`). When standard input ends it dies at once, for its
parent, the worker of rank 0, is gone; the fence of a generation kills it with that worker's process group. The line
"end" lets it finish with the newest checkpoint, for which it tries END_RETRIES_S after the last progress.

Trade-off: it looks once a POLL_S, tries again RETRY_S after a failure for ever, and runs at the lowest priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from myriad.storage.durable.manifest import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    set_under_copy,
)
from myriad.storage.durable.remote import Remote

POLL_S = 1.0
RETRY_S = 5.0
END_RETRIES_S = 600.0
NICENESS = 19
END_WORD = "end"
PARENT_FD = 1
_PR_SET_PDEATHSIG = 1


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: a step whose copy is whole, or why there is none of it; neither says that it goes on."""

    copied: int | None = None
    error: str = ""


class Uploader:
    """See the module. ``run`` returns the exit code: 0 when the newest committed checkpoint has its copy."""

    def __init__(self, directory: Path, url: str, keep: int) -> None:
        self._directory, self._url, self._keep = directory, url, keep
        self._remote: Remote | None = None
        self._whole: Path | None = None  # the newest that is known to have its copy
        self._ending = threading.Event()
        self._progress_s = time.monotonic()

    def run(self) -> int:
        threading.Thread(target=self._listen, daemon=True).start()
        with contextlib.suppress(CheckpointError):  # what one that was killed has left
            set_under_copy(self._directory, None)
        while True:
            ending = self._ending.is_set()  # before looking: what is committed by then is copied
            try:
                busy = self._copy_newest()
            except CheckpointError as error:
                self._say(Said(error=str(error)))
                if ending and time.monotonic() - self._progress_s > END_RETRIES_S:
                    return 1
                time.sleep(RETRY_S) if ending else self._ending.wait(RETRY_S)
                continue
            if not busy:
                if ending:
                    return 0
                self._ending.wait(POLL_S)

    def _copy_newest(self) -> bool:
        """Copy the newest committed checkpoint; False if there is nothing to do. Raises CheckpointError."""
        newest = self._newest()
        if newest is None or newest.path == self._whole:
            return False
        self._remote = self._remote or Remote(self._url)
        name = newest.path.name
        set_under_copy(self._directory, name)
        try:
            if not newest.path.is_dir():
                return True  # pruned before it was spared: there is a newer one
            self._remote.copy_up(newest.path, self._sent)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint {name} was not copied: {error}") from None
        finally:
            set_under_copy(self._directory, None)
        self._whole = newest.path
        self._sent()
        self._say(Said(copied=newest.step))
        self._remote.prune(self._keep)
        return True

    def _newest(self) -> Checkpoint | None:
        return next((each for each in list_checkpoints(self._directory) if each.committed), None)

    def _sent(self, size: int = 0) -> None:
        self._progress_s = time.monotonic()
        self._say(Said())

    def _say(self, said: Said) -> None:
        os.write(PARENT_FD, msgspec.json.encode(said) + b"\n")

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == END_WORD:
                self._progress_s = time.monotonic()  # from here on it counts
                self._ending.set()
        os._exit(1)  # also in the middle of a request


def main(directory: str, url: str, keep: str) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    return Uploader(Path(directory), url, int(keep)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
