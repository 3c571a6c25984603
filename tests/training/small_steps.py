"""A small model, and programs that train it: on one device, and on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    InvalidArgumentError,
)

nn = torch.nn

WAYS: dict[str, Any] = {
    "ddp": "ddp",
    "small buckets": rd.Ddp(bucket_bytes=64),
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "ps": "ps",
    "ps-server": rd.ParameterServer(update="server", servers=[0]),
}
SIZES = (1, 2, 3)
ROWS = 12


class Small(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers, one that only some steps use, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.extra = nn.Linear(5, 5)
        self.last = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Any, *, extra: bool = True) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(self.extra(x) if extra else x)


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Small().double()


START = _start()


def make() -> Any:
    return copy.deepcopy(START)


def rows_of(step: int) -> Any:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class Place:
    """What a program sees of where it runs: one device, or a rank."""

    def __init__(self, model: Any, optimizer: Any, comm: Any = None) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def loss(self, step: int, part: int = 0, parts: int = 1, **options: Any) -> Any:
        """The mean over one of so many parts of this rank's rows."""
        rows = rows_of(step).tensor_split(parts)[part].tensor_split(self.size)[self.rank]
        return self.model(rows, **options).square().mean()

    def weighed(self, step: int, part: int = 0, parts: int = 1, *, more: bool = False) -> None:
        """Backward on a sum, with its weight; one device, which has no such call, divides."""
        rows = rows_of(step).tensor_split(parts)[part].tensor_split(self.size)[self.rank]
        loss = self.model(rows).square().mean(dim=1).sum()
        if self.comm is None:
            (loss / ROWS).backward()
            return
        with self.adding() if more else nullcontext():
            rd.backward(loss, weight=len(rows))

    @contextmanager
    def adding(self) -> Iterator[None]:
        with nullcontext() if self.comm is None else rd.accumulate(self.model):
            yield


Program = Callable[[Place], None]


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def alone(program: Program, optimizer: Any = adam) -> dict[str, Any]:
    model = make()
    program(Place(model, optimizer(model)))
    return {key: one.detach().numpy().copy() for key, one in model.state_dict().items()}


def on_ranks(
    way: str, size: int, program: Program, optimizer: Any = adam, **options: Any
) -> list[Any]:
    def be_rank(comm: Any) -> dict[str, Any]:
        mine = make()
        mine, own = rd.prepare(mine, optimizer(mine), strategy=WAYS[way], comm=comm, **options)
        program(Place(mine, own, comm))
        return {key: plain(one) for key, one in rd.full_state_dict(mine).items()}

    return rd.run(be_rank, size, "threads")


def plain(one: Any) -> Any:
    """As an array; numpy has no bfloat16."""
    wide = one.detach().double() if one.is_floating_point() else one.detach()
    return wide.numpy().copy()


def assert_one_device(way: str, size: int, program: Program, optimizer: Any = adam) -> None:
    expected = alone(program, optimizer)
    for found in on_ranks(way, size, program, optimizer):
        for key, one in expected.items():
            assert_close(found[key], one, key)


def assert_close(found: Any, expected: Any, key: str) -> None:
    """Within 1e-12 of the largest element."""
    scale = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * scale, err_msg=key)


def told_by(way: str, size: int, program: Program, kind: Any = InvalidArgumentError) -> list[str]:
    """Return what every rank was told."""

    def be_rank(comm: Any) -> str:
        mine = make()
        mine, own = rd.prepare(mine, adam(mine), strategy=WAYS[way], comm=comm)
        with pytest.raises(kind) as error:
            program(Place(mine, own, comm))
        return str(error.value)

    return rd.run(be_rank, size, "threads")


def trained_steps(at: Place, steps: range) -> None:
    for step in steps:
        at.loss(step).backward()
        at.optimizer.step()
        at.optimizer.zero_grad()
