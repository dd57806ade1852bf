"""The worker processes of ``data build``, seen from the builder: give out pieces in order, hear how they go.

Each worker has one piece at a time and a pipe each way. A worker that dies, or says nothing for
``SILENCE_S``, is named in the error with the file it was reading; the others are killed, their unfinished
pieces being redone by the next build.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.sources import Piece
from myriad.storage.datasets.worker import Done, Failed, Refused, Setup, Told, Word

PROGRAM = "myriad.storage.datasets.worker"
SILENCE_S = 300.0  # word comes every 0.2 s and after each document; one of 2 GiB has chunks of 1 s
EXIT_S = 10.0  # from the end of a worker's output, or a kill, to its exit status
READ_BYTES = 1 << 16
# A worker is one of many: the threads of its libraries would only get in each other's way.
SINGLE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

OnWord = Callable[[Piece, Told | None], bool]  # None: the piece is done. False: give out no more pieces


def run(pieces: Sequence[Piece], setup: Setup, count: int, on_word: OnWord) -> None:
    """Turn all pieces into parts with ``count`` processes. Raises DatasetError."""
    left = deque(pieces)
    workers = [_Worker(number, setup) for number in range(1, min(count, len(left)) + 1)]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
                worker.give(left.popleft())
            while any(worker.piece for worker in workers):
                for key, _ in selector.select(SILENCE_S):
                    if not _hear(key.data, on_word):
                        left.clear()
                    if key.data.piece is None and left:
                        key.data.give(left.popleft())
                for worker in workers:
                    worker.check_silence()
    finally:
        for worker in workers:
            worker.end()


def _hear(worker: _Worker, on_word: OnWord) -> bool:
    more = True
    for word in worker.words():
        piece = worker.piece
        assert piece is not None, word
        match word:
            case Told():
                on_word(piece, word)
            case Done():
                worker.piece = None
                more = on_word(piece, None)
            case Refused(sentence):
                raise DatasetError(sentence)
            case Failed(traceback):
                raise RuntimeError(f"{worker.name} failed while it read {worker.file}:\n{traceback}")
    return more


class _Worker:
    def __init__(self, number: int, setup: Setup) -> None:
        self.piece: Piece | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **SINGLE},
            process_group=0,  # an interrupt at the terminal is for the builder, which ends its workers
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self.name = f"worker process {number} (pid {self._process.pid})"
        self._unread = b""
        self._heard = time.monotonic()
        self._write(setup)

    @property
    def file(self) -> str:
        return str(self.piece[0].path) if self.piece else "nothing"

    def give(self, piece: Piece) -> None:
        self.piece = piece
        self._heard = time.monotonic()
        self._write(piece)

    def words(self) -> list[Word]:
        """What has been said since; raises DatasetError if the process has ended."""
        data = os.read(self.output.fileno(), READ_BYTES)
        if not data:
            raise DatasetError(self._ended())
        self._heard = time.monotonic()
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=Word) for line in lines]

    def check_silence(self) -> None:
        if self.piece and time.monotonic() - self._heard > SILENCE_S:
            raise DatasetError(
                f"{self.name} has said nothing for {SILENCE_S:.0f} s while it read {self.file}; "
                "check the storage below it and run the same command again"
            )

    def end(self) -> None:
        self._process.kill()
        self._process.wait(EXIT_S)
        self._input.close()
        self.output.close()

    def _write(self, message: Setup | Piece) -> None:
        try:
            self._input.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            pass  # it has died: the end of its output tells

    def _ended(self) -> str:
        code = self._process.wait(EXIT_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = (
            "; the kernel kills so when memory runs out, and fewer --workers need less" if code == -9 else ""
        )
        return (
            f"{self.name} {how} while it read {self.file}{hint}; run the same command again: "
            "what is done is kept"
        )
