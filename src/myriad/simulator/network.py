"""Connections between an agent and the controller, and what can happen to messages on them.

A connection keeps its order, as TCP does, unless the scenario says otherwise; delays, repeats and changes of
order are drawn per message. Nothing passes a partition: it waits, as what TCP sends again does. A message is
lost only with its connection, which may break later than the message got lost (a half-open connection).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from myriad.simulator.heap import Heap
from myriad.simulator.scenario import Network

SLOW_LINK_S = 1.0  # what a slow link adds to a message at most


class Link:
    """The cable of one node: what holds for all its connections. Times are absolute seconds."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._parted_until = 0.0
        self._held: list[Callable[[], None]] = []  # what would have arrived meanwhile
        self.slow_until = 0.0

    @property
    def parted(self) -> bool:
        return self._heap.now < self._parted_until

    def part(self, until: float) -> None:
        """Nothing passes until then."""
        self._parted_until = max(self._parted_until, until)
        self._heap.at(self._parted_until, self._mended)

    def mend(self) -> None:
        self._parted_until = self.slow_until = self._heap.now
        self._mended()

    def _mended(self) -> None:
        while self._held and not self.parted:
            self._held.pop(0)()

    def arrive(self, deliver: Callable[[], None]) -> None:
        """Something comes out of the cable, now or once it is mended."""
        if self.parted or self._held:
            self._held.append(deliver)
        else:
            deliver()


class Connection:
    """One connection. Each end notices its end on its own; ``to_agent`` and ``to_controller`` carry messages."""

    def __init__(self, heap: Heap, link: Link, network: Callable[[], Network], noise: random.Random) -> None:
        self._heap = heap
        self._link = link
        self._network = network
        self._noise = noise
        self._last = [0.0, 0.0]  # when the last message of a direction arrives
        self.agent_open = True
        self.controller_open = True
        self.losing = False  # what is sent from now on gets lost
        self._on_agent_end: Callable[[], None] = lambda: None
        self._on_controller_end: Callable[[], None] = lambda: None

    def on_end(self, agent: Callable[[], None], controller: Callable[[], None]) -> None:
        """What each end does when it notices that the connection has ended."""
        self._on_agent_end, self._on_controller_end = agent, controller

    @property
    def passing(self) -> bool:
        """A heartbeat sent now would arrive."""
        return self.agent_open and self.controller_open and not self.losing and not self._link.parted

    def to_controller(self, deliver: Callable[[], None]) -> None:
        self._send(0, lambda: self.controller_open, deliver)

    def to_agent(self, deliver: Callable[[], None]) -> None:
        self._send(1, lambda: self.agent_open, deliver)

    def _send(self, direction: int, is_open: Callable[[], bool], deliver: Callable[[], None]) -> None:
        if self.losing:
            return
        times = 2 if self._noise.random() < self._network().duplicate else 1
        for _ in range(times):
            arrival = self._heap.now + self.delay_s()
            if self._noise.random() >= self._network().reorder:
                arrival = max(arrival, self._last[direction])
                self._last[direction] = arrival
            self._arrive_at(arrival, lambda: self._arrived(is_open, deliver))

    def _arrive_at(self, when: float, deliver: Callable[[], None]) -> None:
        self._heap.at(when, lambda: self._link.arrive(deliver))

    def delay_s(self) -> float:
        """Until a message that is sent now arrives."""
        delay_s = self._network().delay_s + self._network().jitter_s * self._noise.random()
        if self._heap.now < self._link.slow_until:
            delay_s += SLOW_LINK_S * self._noise.random()
        return delay_s

    def _arrived(self, is_open: Callable[[], bool], deliver: Callable[[], None]) -> None:
        if not self.losing and is_open():
            deliver()

    def close_by_agent(self) -> None:
        """The agent's end is gone; the controller's notices when it can."""
        if self.agent_open:
            self.agent_open = False
            self._arrive_at(self._heap.now + self.delay_s(), self._controller_notices)

    def close_by_controller(self) -> None:
        """What was sent before arrives first."""
        if self.controller_open:
            self.controller_open = False
            arrival = max(self._heap.now + self.delay_s(), self._last[1])
            self._arrive_at(arrival, self._agent_notices)

    def break_off(self) -> None:
        """The connection breaks now, and what was under way is lost."""
        self.losing = True
        self._agent_notices()
        self._controller_notices()

    def _agent_notices(self) -> None:
        if self.agent_open:
            self.agent_open = False
            self._on_agent_end()

    def _controller_notices(self) -> None:
        if self.controller_open:
            self.controller_open = False
            self._on_controller_end()
