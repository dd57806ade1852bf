"""The agent's side of the template: a process that has imported PyTorch and forks workers in milliseconds.

Started as a program and never imported here, so that the agent itself stays small (30 MB against 300).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from myriad.agent import system
from myriad.agent.guard import Guard
from myriad.spec.messages import FromTemplate, TemplateReady
from myriad.storage.memory.channel import Channel, ChannelClosed

log = logging.getLogger("myriad.agent.template")


class TemplateClient:
    """One template process. Requests made before it is ready wait in its socket."""

    def __init__(
        self,
        folder: Path,
        guard: Guard,
        receive: Callable[[FromTemplate], None],
        gone: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._gone = gone
        self._channel: Channel[FromTemplate]
        self._channel, theirs = Channel.pair(FromTemplate)
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")
        env["MYRIAD_TEMPLATE_FD"] = str(theirs.fileno())
        argv = [sys.executable, "-P", "-m", "myriad.training.template"]
        self._guard = guard
        self.pid = system.spawn(argv, env, theirs.fileno(), str(folder / "template.log")).pid
        theirs.close()
        guard.add(self.pid)
        self.ready = False
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self.poll)

    def send(self, request: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queue a request. A template that has died is reported by ``gone``, not here."""
        try:
            self._channel.send(request, fds, timeout_s=1.0)
        except ChannelClosed:
            log.warning("the template died before a request reached it")

    def poll(self) -> None:
        """Take in everything the template has said."""
        try:
            while self._channel.fileno() >= 0 and (received := self._channel.recv_nowait()) is not None:
                message, _ = received
                if isinstance(message, TemplateReady):
                    self.ready = True
                    log.info("template %d ready after %.1f s of imports", self.pid, message.import_s)
                self._receive(message)
        except ChannelClosed:
            self.close()
            self._gone()

    def close(self) -> None:
        """End the template and with it all it has forked."""
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
        system.kill_group(self.pid)
        self._guard.remove(self.pid)
