"""What ZeRO holds and exchanges: counted, and by the formulas of each stage."""

from __future__ import annotations

import torch

from roundelay.training._exchange import told_bytes
from roundelay.training._setup import Setup, storage_bytes
from roundelay.training._strategy import Held, Volume
from roundelay.training._volume import add_up, exchanged, state_bytes
from roundelay.training._zero_parts import Parts
from roundelay.training._zero_sums import Sums

__all__ = ["held_by", "predicted_for"]


def held_by(setup: Setup, parts: Parts, sums: Sums) -> Held:
    """Count live storages, each once."""
    state = [
        value
        for one in setup.optimizer.state.values()
        for value in one.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    masters = [flat.master for flat in parts.trained if flat.has_masters]
    away = parts.flight is not None
    weights = [flat.part for flat in parts.flats] if away else list(setup.model.parameters())
    return Held(
        parameters=storage_bytes(weights),
        gradients=storage_bytes(sums.gradients.held),
        optimizer=storage_bytes([*state, *masters]),
        transient=storage_bytes([*sums.gradients.transient, *parts.transient]),
        host=0
        if setup.host is None
        else storage_bytes([*state, *masters, *(weights if setup.host.parameters else [])]),
    )


def predicted_for(setup: Setup, parts: Parts, sums: Sums, stage: int) -> tuple[Held, Volume]:
    """Say Ψ and Ψ/N of what each stage divides, and 2Ψ(N-1)/N or 3Ψ(N-1)/N as priced."""
    size = setup.within.size
    rows = sums.gradients.rows
    weights = sum(one.numel() * one.dtype.itemsize for one in setup.model.parameters())
    grads = sum(row.flat.layout.numel * row.dtype.itemsize for row in rows)
    masters = sum(row.flat.layout.numel * row.flat.master.dtype.itemsize
                  for row in rows if row.flat.has_masters)  # fmt: skip
    state = state_bytes(setup.optimizer, [one for row in rows for one in row.flat.stepped])
    kept = state + round(masters / size)
    held = Held(
        parameters=weights if parts.flight is None else round(weights / size),
        gradients=grads if stage == 1 else round(grads / size),
        optimizer=kept,
        host=0 if setup.host is None else kept + setup.host.parameters * round(weights / size),
        transient=storage_bytes([*sums.gradients.transient, *parts.transient]),
    )
    return held, add_up(_volumes(setup, parts, sums))


def _volumes(setup: Setup, parts: Parts, sums: Sums) -> list[Volume]:
    comm = setup.within
    found = [exchanged(setup.comm, "all_reduce", told_bytes(len(setup.parameters)), item=8)]
    if comm.size == 1:
        return found
    found += [
        exchanged(comm, "reduce_scatter", row.nbytes, item=row.dtype.itemsize)
        for row in sums.gradients.rows
    ]
    if setup.replicas is not None:
        found += [
            exchanged(setup.replicas, "all_reduce", row.part.nbytes, item=row.dtype.itemsize)
            for row in sums.gradients.rows
        ]
    # After the step, or in forward and, where units do not stay, in backward.
    times = 1 if parts.flight is None or parts.flight.keeps else 2
    for flat in parts.flats:
        found += times * [exchanged(comm, "all_gather", flat.nbytes, item=flat.dtype.itemsize)]
    return found
