"""Small tensors that are reduced side by side, in one call: Horovod's tensor fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from roundelay.fronts.horovod.basics import Adasum, Average

__all__ = ["Pair", "reduce_all"]

#: Bytes up to which copying a tensor there and back costs less than a call of its own.
SMALL = 32 << 10
#: A tensor, and where its reduction goes.
Pair = tuple[torch.Tensor, torch.Tensor]


def reduce_all(
    pairs: Iterable[Pair], op: int, most: int, reduce: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Reduce every pair; small tensors of one dtype together, up to `most` bytes.

    Which go together is told by dtypes and shapes alone, which are alike on all ranks. Every
    element is added up in the order of ranks, wherever it lies, so results are the same to the bit.
    """
    rows: dict[torch.dtype, list[Pair]] = {}
    filled: dict[torch.dtype, int] = {}
    for source, output in pairs:
        dtype, nbytes = source.dtype, source.numel() * source.element_size()
        exact = dtype.is_floating_point or dtype.is_complex or op != Average
        if not 0 < nbytes <= min(SMALL, most) or not exact or op == Adasum:
            reduce(source, output)
            continue
        if filled.get(dtype, 0) + nbytes > most:
            _reduce_row(rows.pop(dtype), reduce)
            filled[dtype] = 0
        rows.setdefault(dtype, []).append((source, output))
        filled[dtype] = filled.get(dtype, 0) + nbytes
    for row in rows.values():
        _reduce_row(row, reduce)


def _reduce_row(row: list[Pair], reduce: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    if len(row) == 1:
        reduce(*row[0])
        return
    flat = torch.cat([source.reshape(-1) for source, _ in row])
    reduce(flat, flat)
    parts = torch.split(flat, [source.numel() for source, _ in row])
    for (source, output), part in zip(row, parts, strict=True):
        output.detach().copy_(part.view(source.shape))
