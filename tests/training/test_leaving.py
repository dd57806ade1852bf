"""The end waits for threads that run, and no longer than its limit for one that never rests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time

from myriad.training.leaving import wait_for_rest

WORK_S = 0.3


def hash_for(seconds: float) -> None:
    """Work that mostly goes on without the interpreter's lock, as a collective's does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.sha256(bytes(1 << 20))


def test_it_waits_for_a_thread_that_works() -> None:
    worker = threading.Thread(target=hash_for, args=(WORK_S,))
    worker.start()
    assert wait_for_rest(30.0)
    assert not worker.is_alive()


def test_a_thread_that_sleeps_is_at_rest() -> None:
    go = threading.Event()
    sleeper = threading.Thread(target=go.wait)
    sleeper.start()
    assert wait_for_rest(30.0) and sleeper.is_alive()
    go.set()
    sleeper.join()


def test_it_does_not_wait_for_ever() -> None:
    worker = threading.Thread(target=hash_for, args=(2 * WORK_S,))
    worker.start()
    assert not wait_for_rest(WORK_S) and worker.is_alive()
    worker.join()


def test_a_session_ends_its_program_at_rest() -> None:
    """The handler is registered with the session of a job, and not outside Myriad."""
    program = (
        "import atexit, socket, os\n"
        "registered = []\n"
        "atexit.register = lambda handler, *rest: registered.append(handler.__name__)\n"
        "from myriad.training import session\n"
        "registered.clear()\n"
        "session.start()\n"
        "assert 'wait_for_rest' not in registered, registered\n"
        "session.connect = lambda channel: session.Session(None, session._nobody(), [])\n"
        "ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "os.environ['MYRIAD_CHANNEL_FD'] = str(theirs.detach())\n"
        "session.start()\n"
        "assert 'wait_for_rest' in registered, registered\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
