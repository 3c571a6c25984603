"""`import roundelay.horovod.keras as hvd`: Horovod's functions for Keras 3, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from roundelay.fronts.horovod import arrays, basics
from roundelay.fronts.horovod.basics import (
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from roundelay.fronts.horovod.errors import HorovodInternalError
from roundelay.fronts.horovod.keras import callbacks
from roundelay.fronts.horovod.keras.optimizer import (
    Compression,
    DistributedOptimizer,
    broadcast_model,
)

__all__ = [
    "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "ProcessSet", "Sum",
    "add_process_set", "allgather", "allreduce", "barrier", "broadcast",
    "broadcast_global_variables", "broadcast_model", "callbacks", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "init", "is_initialized", "join", "load_model", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "reducescatter",
    "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Join the ranks that a launcher started; without one, this is rank 0 of 1."""
    basics.start(arrays.stand_in, comm, process_sets)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,  # noqa: FBT001, FBT002 - Horovod's order
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
) -> Any:
    """Return a value of numpy's or Keras's, reduced over all ranks, as an array."""
    op = (Average if average else Sum) if op is None else op
    scales = prescale_factor, postscale_factor
    return arrays.allreduce([keras.ops.convert_to_numpy(value)], op, name, scales)[0]


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the rows of all ranks, as an array."""
    return arrays.allgather([keras.ops.convert_to_numpy(value)], name)[0]


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value, as an array."""
    return arrays.broadcast([keras.ops.convert_to_numpy(value)], root_rank, name)[0]


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's share of the rows of the reduced value, as an array."""
    return arrays.reducescatter([keras.ops.convert_to_numpy(value)], op, name)[0]


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse: Keras 3 keeps no list of all variables."""
    basics.refuse_globals(root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a model that was saved by Keras, with its optimizer made one of all ranks."""
    known = {one.__name__: one for one in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
