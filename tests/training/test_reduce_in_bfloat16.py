"""A float32 model whose gradients travel as bfloat16: what `wire="bf16"` is to a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import roundelay as rd

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def work(comm: rd.Communicator, strategy: str, reduce: Any) -> tuple[int, list[bool], bool]:
    """Return the bytes of a step, where its gradients are those of the call, and what is kept."""
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    alone = copy.deepcopy(model)
    rows = torch.randn(5, 24, generator=torch.Generator().manual_seed(comm.rank))
    alone(rows).square().sum().backward()
    own = [one.grad for one in alone.parameters() if one.grad is not None]
    wire = "bf16" if reduce is torch.bfloat16 else None
    due = [comm.all_reduce(one.clone(), "avg", wire=wire) for one in own]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = rd.prepare(
        model, optimizer, strategy=strategy, precision=rd.Precision(reduce=reduce), comm=comm
    )
    before = {name: one.clone() for name, one in rd.full_state_dict(model).items()}
    began = comm.traffic()
    model(rows).square().sum().backward()
    ended = comm.traffic()
    optimizer.step()
    assert began is not None
    assert ended is not None
    after = rd.full_state_dict(model)
    same = [
        torch.equal(after[name], before[name] - grad)
        for name, grad in zip(before, due, strict=True)
    ]
    kept = all(one.dtype is torch.float32 for one in after.values())
    return sum(map(sum, ended)) - sum(map(sum, began)), same, kept


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_a_call_with_wire(strategy: str, size: int) -> None:
    found = {
        kind: rd.run(work, size, engine="threads", args=(strategy, kind))
        for kind in (None, torch.bfloat16)
    }
    for ranks in found.values():
        for _, same, kept in ranks:
            assert same == [True] * 4
            assert kept
    plain, narrow = (ranks[0][0] for ranks in found.values())
    assert narrow < plain
