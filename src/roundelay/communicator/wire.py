"""Fewer bytes on the wire: what is float32 for the caller travels as bfloat16, if he asks for it.

A call with `wire="bf16"` is the same call on bfloat16: its input is rounded once, sums are made in
float32 and rounded once, and what comes is widened again. So it is defined wherever calls on
bfloat16 are, by every engine, and all ranks have the same bits. Shared memory rounds on the way
into its slots, so that no copy of the caller's buffers is made; other engines get one.
"""

from __future__ import annotations

from roundelay.arguments import shown
from roundelay.engines import WIRES, CollectiveCall, DeviceArray, wire_name
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError
from roundelay.reductions import Op

__all__ = ["on_wire", "require_built_in"]

#: Reductions that mean the same on rounded numbers; a product would round with every factor.
ROUNDED = ("sum", "avg", "min", "max")


def on_wire(call: CollectiveCall, wire: str | None) -> CollectiveCall:
    """Make a call one that travels so, on the caller's buffers, and return it."""
    if wire is None:
        return call
    name = call.collective
    if wire not in WIRES:
        raise InvalidArgumentError(f"{name} takes wire='bf16' or None, not {shown(wire)}.")
    if call.dtype != "float32":
        raise InvalidArgumentError(
            f"{name} with wire={wire!r} rounds float32 on its way, and got {call.dtype}. Pass "
            f"float32, or leave wire= out."
        )
    if call.op not in ROUNDED:
        raise UnsupportedReductionError(
            f"{name} with wire={wire!r} takes {', '.join(ROUNDED)}, not {call.op}. Leave wire= out."
        )
    if any(isinstance(each, DeviceArray) for each in (call.input, call.output)):
        raise InvalidArgumentError(
            f"{name} with wire={wire!r} takes CPU memory. Pass tensor.bfloat16(), which travels "
            f"as it is."
        )
    call.dtype, call.item, call.nbytes = "bfloat16", 2, call.nbytes // 2
    call.part_of, call.wide = wire_name(name, wire), True
    return call


def require_built_in(name: str, op: Op, wire: str | None) -> None:
    """Refuse `wire=` beside a reduction of the user's own, which would fold rounded numbers."""
    if wire is not None:
        raise UnsupportedReductionError(
            f"{name} with wire={shown(wire)} takes {', '.join(ROUNDED)}, not your own "
            f"{op.reduction.name!r}. Leave wire= out."
        )
