"""The parts of the virtual cluster, each by itself: time, disk, links."""

from __future__ import annotations

import random

import pytest

from myriad.control.events import ClusterConfigured, ControllerStarted
from myriad.control.journal import Entry
from myriad.simulator.cluster import cluster_spec
from myriad.simulator.disk import Disk, DiskError
from myriad.simulator.heap import Heap
from myriad.simulator.network import Connection, Link
from myriad.simulator.scenario import Network, Scenario


def test_events_of_one_moment_run_in_the_order_they_were_asked_for() -> None:
    heap, seen = Heap(), []
    heap.at(2.0, lambda: seen.append("late"))
    for name in "abc":
        heap.at(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    heap.at(1.0, lambda: heap.after(0.0, lambda: seen.append("d")))
    heap.at(-5.0, lambda: seen.append("now"))
    while heap.step(until=1.5):
        pass
    assert seen == ["now", "a", "b", "c", "d"] and heap.now == 1.5
    assert heap.step(until=9.0) and not heap.step(until=9.0) and heap.now == 9.0 and seen[-1] == "late"


# ---------------------------------------------------------------- disk


def commits(disk: Disk) -> list[int]:
    """Write three commits of 1, 2 and 3 rows, all synced; the sizes of the image after each."""
    sizes, seq = [], 1
    spec = cluster_spec(Scenario(seed=0, nodes=2))
    for rows in (1, 2, 3):
        configured = ClusterConfigured(spec=spec, jobs_dir="/jobs")
        entries = [
            Entry(float(seq + n), configured if seq + n == 1 else ControllerStarted(), (), ())
            for n in range(rows)
        ]
        disk.write(seq, entries)
        disk.sync()
        seq += rows
        sizes.append(len(disk.image()))
    return sizes


def test_a_disk_that_is_cut_anywhere_has_a_prefix_of_whole_commits() -> None:
    whole = Disk()
    sizes = commits(whole)
    image = whole.image()
    for length in range(len(image) + 1):
        disk = Disk()
        disk._bytes[:] = image[:length]
        disk.open()
        kept = sum(size <= length for size in sizes)
        assert disk.last_seq == (0, 1, 3, 6)[kept] and len(disk.image()) == ([0, *sizes])[kept], length


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_ends_the_journal_before_its_commit(bit: int) -> None:
    whole = Disk()
    sizes = commits(whole)
    for place in range(sizes[0], sizes[1], 7):
        disk = Disk()
        disk._bytes[:] = whole.image()
        disk._bytes[place] ^= 1 << bit
        disk.open()
        assert disk.last_seq == 1, place


def test_what_was_not_synced_may_be_lost_and_what_was_is_not() -> None:
    for share in (0.0, 0.3, 0.99):
        disk = Disk()
        sizes = commits(disk)
        disk.write(7, [Entry(7.0, ControllerStarted(), (), ())])
        disk.crash(share)
        disk.open()
        assert disk.last_seq == 6 and len(disk.image()) == sizes[-1]


def test_a_disk_that_refuses_keeps_what_it_has() -> None:
    disk = Disk()
    sizes = commits(disk)
    disk.refuses = True
    with pytest.raises(DiskError, match="no space left"):
        disk.write(7, [Entry(7.0, ControllerStarted(), (), ())])
    assert len(disk.image()) == sizes[-1]


# ---------------------------------------------------------------- links


def connection(network: Network) -> tuple[Heap, Link, Connection]:
    heap = Heap()
    link = Link(heap)
    return heap, link, Connection(heap, link, lambda: network, random.Random(1))


def sent(network: Network, count: int = 200) -> list[int]:
    """Numbers sent one after the other, as they arrive."""
    heap, _, line = connection(network)
    arrived: list[int] = []
    for number in range(count):
        heap.at(number * 0.01, lambda number=number: line.to_controller(lambda: arrived.append(number)))  # type: ignore[misc]
    while heap.step(until=1e6):
        pass
    return arrived


def test_a_connection_keeps_its_order_whatever_the_delay() -> None:
    assert sent(Network(delay_s=0.05, jitter_s=3.0)) == list(range(200))


def test_repeats_and_changes_of_order_come_only_where_they_are_drawn() -> None:
    repeated = sent(Network(jitter_s=0.1, duplicate=0.3))
    assert sorted(set(repeated)) == list(range(200)) and repeated == sorted(repeated) and len(repeated) > 220
    mixed = sent(Network(jitter_s=0.5, reorder=0.3))
    assert sorted(mixed) == list(range(200)) and mixed != sorted(mixed)


def test_a_partition_holds_everything_and_lets_it_go_in_order() -> None:
    heap, link, line = connection(Network())
    arrived: list[tuple[float, str]] = []
    link.part(10.0)
    for number in range(5):
        heap.at(
            float(number),
            lambda number=number: line.to_agent(lambda: arrived.append((heap.now, str(number)))),
        )  # type: ignore[misc]
    heap.at(5.0, lambda: link.part(20.0))
    heap.at(20.0, lambda: line.to_agent(lambda: arrived.append((heap.now, "after"))))
    while heap.step(until=1e6):
        pass
    assert [text for _, text in arrived] == ["0", "1", "2", "3", "4", "after"]
    assert {round(at) for at, _ in arrived} == {20} and not link.parted


def test_a_broken_connection_loses_what_is_under_way_and_both_ends_notice() -> None:
    heap, _, line = connection(Network(delay_s=1.0))
    seen: list[str] = []
    line.on_end(agent=lambda: seen.append("agent"), controller=lambda: seen.append("controller"))
    line.to_controller(lambda: seen.append("message"))
    heap.at(0.5, line.break_off)
    while heap.step(until=1e6):
        pass
    assert seen == ["agent", "controller"] and not line.passing


def test_what_was_sent_before_a_close_arrives_before_it() -> None:
    heap, _, line = connection(Network(delay_s=1.0, jitter_s=1.0))
    seen: list[str] = []
    line.on_end(agent=lambda: seen.append("end"), controller=lambda: None)
    line.to_agent(lambda: seen.append("refused"))
    line.controller_open = True
    line.close_by_controller()
    while heap.step(until=1e6):
        pass
    assert seen == ["refused", "end"]
