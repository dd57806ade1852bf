"""The flat state of any loop, and its way through a memory snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from myriad.storage.memory.snapshot import open_snapshot
from myriad.training.state import (
    State,
    StateMismatch,
    copy_from_snapshot,
    create_optimizer_state,
    drop_unsaved_state,
    loop_state,
    plain_name,
    snapshot_entries,
    tensor_sha256,
)
from sealed import write_snapshot

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained(make: Make, steps: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.float32))
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def through_snapshot(source: State, target: State) -> None:
    fd, _, crc32 = write_snapshot(snapshot_entries(source), 1, {})
    try:
        with open_snapshot(fd, crc32) as snapshot:
            copy_from_snapshot(snapshot, target)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
    ids=["adamw", "amsgrad", "momentum", "sgd"],
)
def test_a_fresh_program_continues_bit_for_bit(make: Make) -> None:
    model, optimizer = trained(make, steps=3, seed=1)
    fresh, fresh_optimizer = trained(make, steps=0, seed=2)
    create_optimizer_state(fresh, fresh_optimizer)
    through_snapshot(loop_state(model, optimizer), loop_state(fresh, fresh_optimizer))
    for each, its_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        torch.manual_seed(9)
        its_optimizer.zero_grad()
        each(torch.randn(5, 4)).square().sum().backward()
        its_optimizer.step()
    assert tensor_sha256(loop_state(model, optimizer)) == tensor_sha256(loop_state(fresh, fresh_optimizer))


def test_a_parameter_that_never_had_a_gradient_has_no_state_again() -> None:
    def made() -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        model = nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2)})
        return model, torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], lr=0.1)

    model, optimizer = made()
    model["used"].sum().backward()
    optimizer.step()
    saved = loop_state(model, optimizer)
    fresh, fresh_optimizer = made()
    create_optimizer_state(fresh, fresh_optimizer)
    with pytest.raises(StateMismatch, match=r"optimizer\.exp_avg\.unused is in only one"):
        through_snapshot(saved, loop_state(fresh, fresh_optimizer))
    drop_unsaved_state(fresh, fresh_optimizer, saved)
    through_snapshot(saved, loop_state(fresh, fresh_optimizer))
    assert tensor_sha256(loop_state(fresh, fresh_optimizer)) == tensor_sha256(saved)
    with pytest.raises(StateMismatch, match=r"model\.new is in only one"):
        through_snapshot(saved, saved | {"model.new": torch.ones(2)})


def test_another_model_is_refused() -> None:
    source = {"model.a": torch.zeros(2)}
    with pytest.raises(StateMismatch, match=r"model\.b is in only one"):
        through_snapshot(source, {"model.a": torch.zeros(2), "model.b": torch.zeros(1)})
    with pytest.raises(StateMismatch, match=r"model\.a is \(3,\) here and \(2,\) in the snapshot"):
        through_snapshot(source, {"model.a": torch.zeros(3)})


def test_every_dtype_and_shape_survives() -> None:
    source: State = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(7.0),
        "flag": torch.tensor([True, False]),
        "count": torch.tensor(2**40),
        "strided": torch.randn(4, 6).t(),
        "empty": torch.zeros(0, 3),
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    through_snapshot(source, target)
    assert all(torch.equal(source[name], target[name]) for name in source)


def test_names_are_those_of_the_plain_model() -> None:
    assert plain_name("module._orig_mod.layers.0.weight") == "layers.0.weight"
    assert plain_name("modules.weight") == "modules.weight"
