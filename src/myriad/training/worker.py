"""One worker process of a ``model:`` job, from the fork to its exit code.

The agent is told of an exception before the process ends: by its class and one line. The traceback goes into
the rank's log. A rank that fails because another one is gone says PeerLost, so the first cause can be told
from its echoes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import torch

from myriad.spec.job import JobSpec
from myriad.spec.messages import Failure, ToWorker
from myriad.storage.memory.channel import Channel, ChannelError
from myriad.training.loop import train
from myriad.training.rendezvous import peer_lost
from myriad.training.session import Session, connect

LAST_WORDS_TIMEOUT_S = 2.0  # for the agent to take the failure; it is also seen as an exit


def main(spec: dict[str, Any], channel_fd: int) -> int:
    """Run the job's worker whose agent is at the other end of ``channel_fd``: the exit code."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    channel: Channel[ToWorker] = Channel.from_fd(channel_fd, ToWorker)
    session: Session | None = None
    try:
        session = connect(channel)
        if spec.get("workdir"):
            os.chdir(spec["workdir"])
        train(JobSpec.model_validate(spec), session)
    except BaseException as error:  # noqa: BLE001  CheckpointException of DCP is no Exception
        traceback.print_exc(file=sys.stderr)
        cause = peer_lost(error) or unwrapped(error)
        failure = Failure(
            error_class=type(cause).__name__,
            message=first_line(cause),
            step=session.current_step if session is not None else None,
        )
        with contextlib.suppress(ChannelError):
            channel.send(failure, timeout_s=LAST_WORDS_TIMEOUT_S)
        return 1
    return 0


def unwrapped(error: BaseException) -> BaseException:
    """torch's pipeline wraps what happens in a stage in a bare RuntimeError full of shapes: what is inside."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """What the exception says, without the native stack some of torch's carry."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
