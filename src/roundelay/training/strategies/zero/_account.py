"""What ZeRO holds and exchanges: counted, and by the formulas of each stage."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.planning.held import Held
from roundelay.planning.rows import PARTS_AFTER_STEP, passed_through
from roundelay.training._exchange import told_bytes
from roundelay.training._setup import Setup, storage_bytes
from roundelay.training._volume import (
    add_up,
    buffers_volume,
    exchanged,
    held_by,
    model_bytes,
    state_bytes,
)
from roundelay.training.precision import master_dtype
from roundelay.training.strategies.zero._flat_parameter import FlatParameter
from roundelay.training.strategies.zero._grad_buckets import GradBuckets
from roundelay.training.strategies.zero._partition import Partition
from roundelay.training.strategy import Volume


def held_by_zero(setup: Setup, partition: Partition, buckets: GradBuckets) -> Held:
    """Count live storages, each once."""
    away = partition.scheduler is not None
    weights = [flat.part for flat in partition.flats] if away else list(setup.model.parameters())
    masters = [flat.master for flat in partition.trained if flat.has_masters]
    kept = [*held_by(setup.optimizer), *masters]
    model = storage_bytes([*weights, *setup.model.buffers()])
    grads = storage_bytes(buckets.held)
    apart = setup.host is not None and setup.host.parameters
    return Held(
        parameters=model,
        gradients=grads,
        optimizer=storage_bytes(kept),
        transient=storage_bytes([*buckets.transient, *partition.transient]),
        host=0
        if setup.host is None
        else storage_bytes(kept) + apart * (storage_bytes(weights) + grads),
    )


def predicted_for(setup: Setup, partition: Partition, stage: int) -> tuple[Held, Volume]:
    """Say Ψ and Ψ/N of what each stage divides, padded, and 2Ψ(N-1)/N or 3Ψ(N-1)/N as priced."""
    alone, trained = setup.within.size == 1, partition.trained
    wire = [setup.precision.reduce or flat.dtype for flat in trained]
    rows = [flat.layout.padded * kind.itemsize for flat, kind in zip(trained, wire, strict=True)]
    shares = [flat.layout.part * kind.itemsize for flat, kind in zip(trained, wire, strict=True)]
    transient = 0
    if not alone:
        several = setup.step.count > setup.step.number  # passes in a step
        transient = passed_through(rows, shares, stage, several=several)
        if partition.scheduler is None:  # parts on their way after a step
            own = [flat.layout.part * flat.dtype.itemsize for flat in trained]
            transient += PARTS_AFTER_STEP * max(own, default=0)
    kept, weights = _state(setup, trained), _weights(setup, partition)
    grads = sum(rows if stage == 1 else shares)
    apart = setup.host is not None and setup.host.parameters
    if apart:  # as the optimizer wants them
        grads = sum(flat.layout.part * flat.master.dtype.itemsize for flat in trained)
    held = Held(
        parameters=weights,
        gradients=grads,
        optimizer=kept,
        transient=transient,
        host=0 if setup.host is None else kept + apart * (_divided(partition) + grads),
    )
    return held, add_up(_volumes(setup, partition, rows))


def _weights(setup: Setup, partition: Partition) -> int:
    inside = {id(partition.parameters[place.index].tensor)
              for flat in partition.flats for place in flat.layout.places}  # fmt: skip
    rest = model_bytes(setup, but=inside)
    if partition.scheduler is not None:
        return rest + _divided(partition)
    return rest + sum(flat.layout.padded * flat.dtype.itemsize for flat in partition.flats)


def _divided(partition: Partition) -> int:
    return sum(flat.layout.part * flat.dtype.itemsize for flat in partition.flats)


def _state(setup: Setup, trained: Sequence[FlatParameter]) -> int:
    """Return the bytes of masters, and of state on pieces of parameters that were stepped on."""
    total = 0
    for flat in trained:
        first = setup.parameters[flat.layout.places[0].index]
        kind = setup.dtypes[first.name]
        kind = master_dtype(kind) if setup.precision.mixed else kind
        if flat.has_masters:
            total += flat.layout.part * kind.itemsize
        shapes = [
            (
                piece.index,
                (piece.stop - piece.start,) if flat.cuts else flat.shape(piece.index),
                kind,
            )
            for piece in flat.layout.pieces(setup.within.rank)
        ]
        total += state_bytes(setup, shapes, setup.stepped_on)
    return total


def _volumes(setup: Setup, partition: Partition, rows: Sequence[int]) -> list[Volume]:
    comm = setup.within
    told = told_bytes(len(setup.parameters)) + (0 if partition.scheduler is None else 8)
    found = [exchanged(setup.comm, "all_reduce", told, item=8),
             buffers_volume(setup)]  # fmt: skip
    if comm.size == 1:
        return found
    for flat, nbytes in zip(partition.trained, rows, strict=True):
        item = (setup.precision.reduce or flat.dtype).itemsize
        found.append(exchanged(comm, "reduce_scatter", nbytes, item=item))
        experts = flat.layout.places[0].index in setup.experts
        if setup.replicas is not None and not experts:
            share = flat.layout.part * item
            found.append(exchanged(setup.replicas, "all_reduce", share, item=item))
    # After the step, or in forward and, where units do not stay, in backward.
    times = 1 if partition.scheduler is None or partition.scheduler.keeps else 2
    for flat in partition.flats:
        found += times * [exchanged(comm, "all_gather", flat.nbytes, item=flat.dtype.itemsize)]
    return found
