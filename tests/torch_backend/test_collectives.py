"""Every collective on every dtype: against numpy-free arithmetic in torch, and against gloo."""
# ruff: noqa: FBT001 - ranks are sent their arguments by position
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

REDUCED = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
]  # fmt: skip
MOVED = [
    *REDUCED, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32,
]  # fmt: skip
SHAPES = [(), (0,), (3, 4), (1000, 7)]
#: Ranks, whether tensors are contiguous, whether calls are in the background.
CASES = [
    (2, True, True), (2, True, False), (2, False, True), (2, False, False),
    (3, True, True), (3, False, False), (4, True, False), (4, False, True),
    (7, True, False), (7, False, True),
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def filled(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that differ by rank and place, small enough for products in every dtype."""
    numel = int(torch.Size(shape).numel())
    numbers = (torch.arange(numel) * 3 + rank * 5) % 4 + 1
    if dtype is torch.bool:
        return (numbers % 2 == 1).view(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double()).to(dtype).view(shape)
    return numbers.to(torch.float32).to(dtype).view(shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of a larger tensor."""
    room = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


def finish(work: Any) -> None:
    if work is not None:
        assert work.wait()
        assert work.is_completed()


def each(fold: Any, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """Fold all ranks' tensors from left to right, as wide as the communicator does."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = filled(0, shape, dtype).to(wide)
    for rank in range(1, size):
        result = fold(result, filled(rank, shape, dtype).to(wide))
    return result.to(dtype)


FOLDS = {
    "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


#: What is reduced, and what is only moved.
REDUCTIONS = [
    (dtype, shape, name)
    for dtype, shape, name in product(REDUCED, SHAPES, FOLDS)
    if not (dtype.is_floating_point and name.startswith("B"))
]
MOVES = list(product(MOVED, SHAPES))


def reductions(cells: list[Any], contiguous: bool, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, shape, name in cells:
        fold = FOLDS[name]
        expected = each(fold, dtype, shape, size)
        op = getattr(dist.ReduceOp, name)
        given = filled(rank, shape, dtype)
        x = given.clone() if contiguous else strided(given)
        finish(dist.all_reduce(x, op, async_op=async_op))
        assert bits(x) == bits(expected), (dtype, shape, name)
        x = given.clone() if contiguous else strided(given)
        finish(dist.reduce(x, size - 1, op, async_op=async_op))
        assert bits(x) == bits(expected if rank == size - 1 else given)
        parts = [filled(rank + other, shape, dtype) for other in range(size)]
        out = torch.zeros_like(given) if contiguous else strided(torch.zeros_like(given))
        finish(dist.reduce_scatter(out, parts, op, async_op=async_op))
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        mine = filled(rank, shape, dtype).to(wide)
        for other in range(1, size):
            mine = fold(mine, filled(rank + other, shape, dtype).to(wide))
        assert bits(out) == bits(mine.to(dtype)), (dtype, shape, name)


@pytest.mark.parametrize(("size", "contiguous", "async_op"), CASES)
def test_reductions(worlds: Any, size: int, contiguous: bool, async_op: bool, sample: Any) -> None:
    worlds.of(size)(reductions, sample.cells(REDUCTIONS, 4), contiguous, async_op)


WHOLE = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def averaged(rows: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """As NCCL: the sum wraps as the dtype does, and is divided towards zero."""
    size, wide = len(rows), 8 * dtype.itemsize
    sums = [sum(row) % 2**wide for row in zip(*rows, strict=True)]
    if dtype.is_signed:
        sums = [one - 2**wide if one >= 2 ** (wide - 1) else one for one in sums]
    quotients = [abs(one) // size * (1 if one >= 0 else -1) for one in sums]
    return torch.tensor(quotients, dtype=dtype)


def averages_of_integers(contiguous: bool, async_op: bool) -> int:
    rank, size, done = dist.get_rank(), dist.get_world_size(), 0
    lay = (lambda x: x.clone()) if contiguous else strided
    for dtype in WHOLE:
        limits = torch.iinfo(dtype)
        signs = (-1, 1) if dtype.is_signed else (1, 1)
        # Odd sums of both signs, and sums that do not fit.
        rows = [
            [*(signs[n % 2] * (n * 7 + r) for n in range(11)), limits.max - r, limits.min + r]
            for r in range(size)
        ]
        mine, expected = torch.tensor(rows[rank], dtype=dtype), averaged(rows, dtype)
        x = lay(mine)
        finish(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=async_op))
        assert torch.equal(x, expected), (dtype, x, expected)
        x = lay(mine)
        finish(dist.reduce(x, size - 1, dist.ReduceOp.AVG, async_op=async_op))
        assert torch.equal(x, expected if rank == size - 1 else mine), dtype
        out = lay(torch.zeros_like(mine))
        finish(dist.reduce_scatter(out, [mine] * size, dist.ReduceOp.AVG, async_op=async_op))
        assert torch.equal(out, expected), dtype
        out = lay(torch.zeros_like(mine))
        finish(
            dist.reduce_scatter_tensor(
                out, torch.cat([mine] * size), dist.ReduceOp.AVG, async_op=async_op
            )
        )
        assert torch.equal(out, expected), dtype
        done += 1
    return done


@pytest.mark.parametrize(("size", "contiguous", "async_op"), CASES)
def test_averages_of_integers_are_those_of_nccl(
    worlds: Any, size: int, contiguous: bool, async_op: bool
) -> None:
    assert worlds.of(size)(averages_of_integers, contiguous, async_op) == [len(WHOLE)] * size


def moves(cells: list[Any], contiguous: bool, async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lay = (lambda x: x.clone()) if contiguous else strided
    for dtype, shape in cells:
        if dtype is torch.complex32 and not contiguous:
            continue
        mine = filled(rank, shape, dtype)
        every = [filled(other, shape, dtype) for other in range(size)]
        blank = filled(0, shape, dtype)

        x = lay(mine)
        finish(dist.broadcast(x, size - 1, async_op=async_op))
        assert bits(x) == bits(every[-1]), (dtype, shape)

        outs = [lay(blank) for _ in range(size)]
        finish(dist.all_gather(outs, lay(mine), async_op=async_op))
        assert [*map(bits, outs)] == [*map(bits, every)]

        outs = [lay(blank) for _ in range(size)]
        finish(dist.gather(lay(mine), outs if rank == 1 else None, dst=1, async_op=async_op))
        assert rank != 1 or [*map(bits, outs)] == [*map(bits, every)]

        out = lay(blank)
        parts = [lay(one) for one in every] if rank == 1 else None
        finish(dist.scatter(out, parts, src=1, async_op=async_op))
        assert bits(out) == bits(mine)

        stacked = lay(torch.stack([blank] * size))
        finish(dist.all_gather_single(stacked, lay(mine), async_op=async_op))
        assert bits(stacked) == b"".join(map(bits, every))

        outs = [lay(blank) for _ in range(size)]
        finish(dist.all_to_all(outs, [lay(mine) for _ in range(size)], async_op=async_op))
        assert [*map(bits, outs)] == [*map(bits, every)]

        x, out = lay(torch.stack([mine] * size)), lay(torch.stack([blank] * size))
        finish(dist.all_to_all_single(out, x, async_op=async_op))
        assert bits(out) == b"".join(map(bits, every))


@pytest.mark.parametrize(("size", "contiguous", "async_op"), CASES)
def test_moves(worlds: Any, size: int, contiguous: bool, async_op: bool, sample: Any) -> None:
    worlds.of(size)(moves, sample.cells(MOVES, 3), contiguous, async_op)
