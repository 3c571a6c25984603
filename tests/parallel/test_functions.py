"""Backward of every collective is its adjoint: what gradients mean, over all ranks, on any dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel import functions  # noqa: E402 - only with torch

SIZES = (1, 2, 3, 4)
Body = Callable[[Any, rd.Communicator], Any]
#: Where ranks go on with losses of their own, which add up.
ADDED: dict[str, Body] = {
    "all_gather": lambda x, comm: functions.all_gather(x, comm, 1),
    "reduce_scatter": lambda x, comm: functions.reduce_scatter(x, comm, -1),
    "uneven reduce_scatter": lambda x, comm: functions.reduce_scatter(x, comm, 0),
    "all_to_all": lambda x, comm: functions.all_to_all(x, comm, 2, 0),
}
#: Where all go on alike, and the loss is that of each.
ALIKE: dict[str, Body] = {
    "copy, reduce": lambda x, comm: functions.reduce(
        functions.copy(x, comm) * (comm.rank + 1), comm),
    "split, gather": lambda x, comm: functions.gather(
        functions.split(x, comm, 2) * (comm.rank + 2), comm, 2),
    "uneven split, gather": lambda x, comm: functions.gather(
        functions.split(x, comm, 0) * 3, comm, 0, functions.counts_of(x.size(0), comm.size)),
}  # fmt: skip


def drawn(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ADDED)
def test_gradients_of_what_adds_up(name: str, size: int) -> None:
    """Compare with finite differences of the sum of all losses: they are linear, so exactly."""

    def body(comm: rd.Communicator) -> None:
        xs = [drawn(rank, 5, 2, 12) for rank in range(size)]
        x = xs[comm.rank].clone().requires_grad_()
        y = ADDED[name](x, comm)
        weight = drawn(100 + comm.rank, *y.shape)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        inner = comm.all_reduce(
            torch.stack([(y.detach() * weight).sum(), (x * grad).sum().detach()])
        )
        torch.testing.assert_close(inner[0], inner[1], rtol=1e-12, atol=1e-12)
        # Along one rank's input alone: its gradient, and nobody else's.
        for rank in range(size):
            step = drawn(7, 5, 2, 12) if comm.rank == rank else torch.zeros_like(x)
            moved = ADDED[name](x.detach() + step, comm)
            change = comm.all_reduce(((moved - y.detach()) * weight).sum().reshape(1))
            mine = comm.all_reduce((step * grad).sum().reshape(1))
            torch.testing.assert_close(change, mine, rtol=1e-11, atol=1e-11)

    rd.run(body, size, "threads")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALIKE)
def test_gradients_of_what_all_go_on_with(name: str, size: int) -> None:
    def body(comm: rd.Communicator) -> None:
        x = drawn(0, 5, 2, 12).requires_grad_()
        y = ALIKE[name](x, comm)
        weight = drawn(1, *y.shape)
        loss = (y * y * weight).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        step = drawn(2, *x.shape)
        h = 1e-5
        there, back = (
            (ALIKE[name](x.detach() + sign * h * step, comm) ** 2 * weight).sum()
            for sign in (1, -1)
        )
        along = (grad * step).sum()
        torch.testing.assert_close((there - back) / (2 * h), along.detach(), rtol=1e-7, atol=1e-7)
        (second,) = torch.autograd.grad(along, x)
        torch.testing.assert_close(
            (second * x).sum().detach(), along.detach(), rtol=1e-9, atol=1e-9
        )
        every = comm.all_gather(grad.detach())
        assert all(torch.equal(row, every[0]) for row in every)

    rd.run(body, size, "threads")
