"""The collectives as JAX primitives: inside `jit`, `scan`, `cond`, `grad` and `vmap`, on the CPU.

On ranks of one host XLA calls the native core itself, without Python or its lock. An ordered effect
keeps the calls of a program in the order in which they were written, on all ranks alike.
"""

try:
    import jax as _jax  # noqa: F401 - whether it is there
except ModuleNotFoundError as _error:
    if _error.name != "jax":
        raise
    from roundelay.errors import MissingPackageError as _Missing

    raise _Missing("rd.jax", "jax", "jax") from None

from roundelay.fronts.jax.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from roundelay.fronts.jax.messages import recv, send, sendrecv
from roundelay.fronts.jax.training import (
    average_gradients,
    broadcast_parameters,
    grad,
    value_and_grad,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "exscan",
    "gather",
    "grad",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "value_and_grad",
]
