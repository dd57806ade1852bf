"""What does a durable checkpoint cost the training loop? Myriad against torch.distributed.checkpoint.

    make bench NAME=checkpoint          (python -m benchmarks.checkpoint [--rounds 2] [--publish])

About 400 MB of model and Adam state on 8 ranks (dp_shard 4 x tp 2), fsynced to the same disk. One set of processes
runs the same 50 steps again and again, each time saved in another way every 10 steps, and without saves in between:

    cost per save = (time of 50 steps with saves - time of 50 steps without) / saves,

the time ending when the last save is on storage. The ways are Myriad's session (a snapshot in memory, written to a
plain DCP directory behind the loop, with checksums and a manifest), DCP's ``save``, ``async_save`` in a thread and
``async_save`` with a stager that copies behind the loop. Each of DCP's is used at its documented best on a machine
without accelerator: plans cached, one stager kept so that its buffers are, a gloo group of its own, the staged copy
waited for only before the optimizer step. Not used: pinned memory and non-blocking copies (they need an accelerator)
and the process-based executor (it starts one more interpreter per rank, eight here, on the cores that train).

Also: a snapshot's rate, checksum included, beside a copy of the same bytes in the same process, each to memory in use
and to new memory; restoring from memory and from storage; and the step time above which saving costs
less than 2 %.

On two cores eight ranks have no idle core to write with, so what is measured is mostly CPU time: on a machine with
cores to spare all ways but ``save`` cost less.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import RUNS, Aim, arguments, conclude, machine, say, table
from myriad.spec.messages import Intervals

PLACE = RUNS / "checkpoint"
RANKS = 8
PEERS = ("dcp save", "dcp async_save, thread", "dcp async_save, staged")
WAYS = ("none", "myriad", "snapshot", *PEERS)
NEVER_SAVE = Intervals(memory=10**9, peer=0, durable=10**9)  # the ways say themselves when they save
ENOUGH_S = 300.0  # no further round is begun after so long
JOB = {
    "name": "checkpoint",
    "nodes": 1,
    "model": {
        "layers": 8,
        "dim": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn_dim": 1408,
        "vocab_size": 8192,
    },
    "layout": {"dp_shard": 4, "tp": 2},
    "data": {"path": "none", "sequence_length": 64, "global_batch": 4},
    "optimizer": {"steps": 100, "learning_rate": 1e-3},
}


def main() -> int:
    """Measure, print the tables, and end with the aims."""
    parser = arguments("checkpoint", "Cost of a durable checkpoint: Myriad against DCP.")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way, if time allows")
    given = parser.parse_args()
    about = machine()
    say(about)
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    found = measure(given.rounds)
    findings = show(found)
    shutil.rmtree(PLACE, ignore_errors=True)
    command = f"python -m benchmarks.checkpoint --rounds {given.rounds}"
    return conclude(
        "checkpoint", aims(found), command, {"machine": about, "findings": findings}, given.publish
    )


# ---------------------------------------------------------------- processes


def measure(rounds: int) -> dict[str, Any]:
    """Fork the ranks and play their agent until they have ended; what rank 0 has found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    import benchmarks.saving_ranks  # noqa: F401  once, before the fork
    from myriad.spec.messages import FromWorker
    from myriad.storage.memory.channel import Channel

    channels = []
    pids = []
    heard, told = os.pipe()
    for rank in range(RANKS):
        channel: Channel[FromWorker]
        channel, theirs = Channel.pair(FromWorker)
        if (pid := os.fork()) == 0:
            os.close(heard)
            run_rank(rank, rounds, theirs.fileno(), told)
        theirs.close()
        channels.append(channel)
        pids.append(pid)
    os.close(told)
    try:
        play_agent(channels)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with os.fdopen(heard) as stream:
        lines = stream.read()
    if any(codes):
        sys.exit(f"a rank failed ({codes}); what it said is above")
    found: dict[str, Any] = json.loads(lines)
    return found


def run_rank(rank: int, rounds: int, channel_fd: int, told: int) -> None:
    """In the child: measure, tell, and leave without the parent's exit handlers."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        found = rank_main(rank, rounds, channel_fd)
        if rank == 0:
            os.write(told, json.dumps(found).encode())
        code = 0
    except BaseException:  # noqa: BLE001  reported here, and the exit code says so
        traceback.print_exc()
    finally:
        os._exit(code)


def rank_main(rank: int, rounds: int, channel_fd: int) -> dict[str, Any]:
    import torch.distributed as dist

    from benchmarks.saving_ranks import Rank
    from myriad.spec.job import JobSpec

    one = Rank(rank, PLACE / "rendezvous", PLACE, JobSpec.model_validate(JOB), channel_fd)
    found: dict[str, Any] = {"runs": []}
    began = time.monotonic()
    one.run_way("none", 0)  # warms up: not counted
    for turn in range(1, rounds + 1):
        if any(everyone(time.monotonic() - began > ENOUGH_S)):
            break
        for name in WAYS if turn % 2 else reversed(WAYS):
            run = one.run_way(name, turn)
            found["runs"].append({"way": name, **run})
            if rank == 0:
                say(f"{name}: {run['seconds']:.1f} s for 50 steps (load {os.getloadavg()[0]:.1f})")
    found["copies"] = one.copies() if rank == 0 else {}
    dist.barrier()
    found["restores"] = one.restores()
    found["bytes"] = sum(everyone(one.bytes))
    dist.barrier()
    return found


def everyone(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def play_agent(channels: Sequence[Any]) -> None:
    """Welcome every rank, keep its two newest snapshots, commit what all have saved; until all have left."""
    from myriad.spec.messages import Committed, Dropped, ShardsSaved, SnapshotTaken
    from myriad.storage.memory.channel import ChannelClosed

    for rank, channel in enumerate(channels):
        channel.send(welcome(rank))
    held: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(RANKS)}  # (fd, buffer)
    saved: list[int] = []  # steps, one entry a rank
    open_ones = {channel.fileno(): rank for rank, channel in enumerate(channels)}
    while open_ones:
        for fd in select.select(list(open_ones), [], [])[0]:
            rank = open_ones[fd]
            try:
                received = channels[rank].recv_nowait()
            except ChannelClosed:
                del open_ones[fd]
                continue
            message, fds = received or (None, [])
            if isinstance(message, SnapshotTaken):
                held[rank].append((fds[0], message.buffer))
                for fd, buffer in held[rank][:-2]:
                    os.close(fd)
                    channels[rank].send(Dropped(buffer=buffer))
                del held[rank][:-2]
            elif isinstance(message, ShardsSaved):
                saved.append(message.shards.step)
                if saved.count(message.shards.step) == RANKS:
                    saved = [step for step in saved if step != message.shards.step]
                    for each in channels:
                        each.send(Committed(step=message.shards.step, intervals=NEVER_SAVE))


def welcome(rank: int) -> Any:
    from myriad.spec.messages import WorkerWelcome

    return WorkerWelcome(
        job="bench",
        job_name="checkpoint",
        generation=1,
        rank=rank,
        local_rank=rank,
        world_size=RANKS,
        job_dir=str(PLACE),
        restore_step=None,
        restore_generation=0,
        tier="none",
        durable_step=None,
        intervals=NEVER_SAVE,
    )


# ---------------------------------------------------------------- results


def costs_s(found: Mapping[str, Any]) -> dict[str, float]:
    """Way to seconds a save costs the loop: medians over the rounds."""
    from benchmarks.saving_ranks import SAVES

    seconds = {
        way: statistics.median(run["seconds"] for run in found["runs"] if run["way"] == way) for way in WAYS
    }
    return {way: (seconds[way] - seconds["none"]) / SAVES for way in WAYS if way != "none"}


def show(found: Mapping[str, Any]) -> list[str]:
    """The table, and the lines a reader wants."""
    from benchmarks.saving_ranks import EVERY, SAVES, STEPS

    costs = costs_s(found)
    rows, lines = [], []
    for way in WAYS:
        runs = [run for run in found["runs"] if run["way"] == way]
        cost = f"{costs[way]:.3f}" if way in costs else ""
        rows.append([way, ", ".join(f"{run['seconds']:.1f}" for run in runs), cost])
        lines.append(f"{way}: {STEPS} steps in {rows[-1][1]} s" + (f"; {cost} s a save" if cost else ""))
    say()
    table(["way", f"{STEPS} steps, {SAVES} saves (s)", "cost per save (s)"], rows)
    none = [run["seconds"] for run in found["runs"] if run["way"] == "none"]
    losses = {tuple(run["losses"]) for run in found["runs"]}
    sample = [float.fromhex(found["runs"][0]["losses"][i]) for i in (0, -1)]
    copies, restores = found["copies"], found["restores"]
    rates = {name: copies["bytes"] / copies[name] / 1e9 for name in ("snapshot", "first", "copy", "new")}
    step_s = statistics.median(none) / STEPS
    lines = [
        f"{found['bytes'] / 1e6:.0f} MB of model and Adam state on {RANKS} ranks; a step takes {step_s:.3f} s",
        *lines,
        f"losses of all {len(found['runs'])} runs: {len(losses)} sequence(s); {sample[0]:.4f} at first, {sample[1]:.4f} at last",
        (
            f"one rank's {copies['bytes'] / 1e6:.0f} MB alone: snapshot {rates['snapshot']:.2f} GB/s, memcpy "
            f"{rates['copy']:.2f} GB/s, both to memory in use; to new memory {rates['first']:.2f} and {rates['new']:.2f} GB/s"
        ),
        (
            f"all ranks have their state back from memory in {restores['memory']:.3f} s, from storage in "
            f"{restores['durable']:.3f} s (from the page cache)"
        ),
        (
            f"saving costs less than 2 % of steps that take more than {costs['myriad'] / 0.02 / EVERY:.2f} s with a "
            f"checkpoint every {EVERY} steps, {costs['myriad'] / 0.02 / 100:.3f} s with one every 100, and "
            f"{costs['snapshot'] / 0.02:.2f} s with a snapshot in memory every step"
        ),
        (
            "peers: state_dict_saver.save / async_save(state, storage_writer=FileSystemWriter(path, sync_files=True), "
            "planner=DefaultSavePlanner(enable_plan_caching=True), process_group=<gloo, its own>, async_stager="
            "DefaultStager(StagingOptions(False, False, False, False)), or (False, True, True, False) when staged)"
        ),
    ]
    say()
    for line in lines:
        say(line)
    return lines


def aims(found: Mapping[str, Any]) -> list[Aim]:
    costs, copies, restores = costs_s(found), found["copies"], found["restores"]
    best = min(costs[way] for way in PEERS)
    return [
        Aim("cost_per_save_ratio_to_best_dcp", "<= 0.5", costs["myriad"] / best),
        Aim("snapshot_rate_ratio_to_memcpy", ">= 0.5", copies["copy"] / copies["snapshot"]),
        Aim("first_snapshot_rate_ratio_to_memcpy_into_new_memory", ">= 0.5", copies["new"] / copies["first"]),
        Aim("restore_from_memory_times_faster", ">= 5", restores["durable"] / restores["memory"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
