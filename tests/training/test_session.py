"""One's own loop: the same script runs alone, under an agent, and after losing a rank, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_harness import Cluster

PROGRAM = str(Path(__file__).parent / "programs" / "own_loop.py")
FAILS_IN_MID_SAVE = Path(__file__).parent / "programs" / "ends_in_mid_save.py"
STEPS = 10


def test_outside_myriad_every_call_does_nothing() -> None:
    code = """
import torch
from myriad.training import session
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = session.start(steps=3)
assert run.restore(model, optimizer) == 0
for number in range(1, 4):
    with run.step(number) as step:
        with step.data():
            x = torch.ones(1, 2)
        model(x).sum().backward()
        optimizer.step()
        step.report(loss=1.0, tokens=2)
        step.consumed([number], position=number)
run.finish()
assert run.position == 3
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MYRIAD_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, env=clean, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp", 3), ("fsdp", 2)])
def test_own_loop_restarts_bit_identically(kind: str, world: int, cluster: Cluster, tmp_path: Path) -> None:
    unbroken = cluster.start_command([PROGRAM, str(STEPS), str(tmp_path / "want"), kind], world).wait()
    assert set(unbroken.codes()) == {0}, unbroken.describe()
    assert set(unbroken.losses()) == set(range(1, STEPS + 1))
    broken = cluster.start_command([PROGRAM, str(STEPS), str(tmp_path / "never"), kind], world)
    while len(broken.workers[1].reports) < 6:
        assert broken.workers[1].code is None, broken.describe()
        broken.poll(1.0)
    broken.kill(1)
    broken.wait()
    step = min(max(worker.snapshots) for worker in broken.workers.values())
    again = cluster.start_command(
        [PROGRAM, str(STEPS), str(tmp_path / "got"), kind], world, restore=broken, step=step
    ).wait()
    assert set(again.codes()) == {0}, again.describe()
    assert (tmp_path / "got").read_text() == (tmp_path / "want").read_text()
    assert broken.losses() | again.losses() == unbroken.losses()
    assert not (tmp_path / "never").exists()
    phases = again.workers[0].phases
    assert phases == ["rendezvous", "restore", "first_step"]


@pytest.mark.slow
def test_a_program_that_fails_while_a_save_is_in_flight_fails_of_its_own_error(cluster: Cluster) -> None:
    """And of no signal, which would say that something has killed it: the save comes back to an interpreter that ends."""
    failed = cluster.start_command([str(FAILS_IN_MID_SAVE), "0.3"], 2).wait()
    assert failed.codes() == [1, 0], failed.describe()
    assert "a mistake of the user's" in cluster.log(0).read_text()
