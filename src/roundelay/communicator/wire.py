"""Fewer bytes on the wire: what is float32 for the caller travels as bfloat16, if he asks for it.

A call with `wire="bf16"` is the same call on bfloat16: its input is rounded once, sums are made in
float32 and rounded once, and what comes is widened again. So it is defined wherever calls on
bfloat16 are, by every engine, and all ranks have the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.arguments import shown
from roundelay.communicator.memory import private
from roundelay.engines import WIRES, CollectiveCall, DeviceArray, wire_name
from roundelay.errors import InvalidArgumentError, NoRoomError, UnsupportedReductionError
from roundelay.reductions import Array, Op

__all__ = ["on_wire", "require_built_in"]

#: Reductions that mean the same on rounded numbers; a product would round with every factor.
ROUNDED = ("sum", "avg", "min", "max")


#: Returns so many bytes that the engine reaches best, or raises `NoRoomError`.
Memory = Callable[[int], Array]
#: From here on memory that is kept for the next call is worth asking for.
KEPT_FROM = 32 * 1024


def on_wire(call: CollectiveCall, wire: str | None, memory: Memory) -> CollectiveCall:
    """Return the call as it travels, in memory of its own; without `wire` as it is."""
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
    return _narrowed(call, wire, memory)


def require_built_in(name: str, op: Op, wire: str | None) -> None:
    """Refuse `wire=` beside a reduction of the user's own, which would fold rounded numbers."""
    if wire is not None:
        raise UnsupportedReductionError(
            f"{name} with wire={shown(wire)} takes {', '.join(ROUNDED)}, not your own "
            f"{op.reduction.name!r}. Leave wire= out."
        )


def _narrowed(call: CollectiveCall, wire: str, memory: Memory) -> CollectiveCall:
    given = _room(call, call.input, memory)
    in_place = call.input is call.output
    output = given if in_place else _room(call, call.output, memory)
    if given is not None:
        _core.to_bfloat16(given, call.input)

    def widened() -> Any:
        if output is not None:
            _core.from_bfloat16(call.output, output)
        return call.finish()

    return replace(
        call,
        dtype="bfloat16",
        item=2,
        nbytes=call.nbytes // 2,
        input=given,
        output=output,
        finish=widened,
        part_of=wire_name(call.collective, wire),
    )


def _room(call: CollectiveCall, array: Array | None, memory: Memory) -> Array | None:
    """Return room for as many elements of bfloat16."""
    if array is None:
        return None
    if 2 * array.size >= KEPT_FROM:
        with contextlib.suppress(NoRoomError):
            # Few sizes are kept. The memory goes back when nothing is seen of it any more, which
            # numpy forgets of an array whose views it keeps, and does not of a memoryview.
            kept = memory(1 << (2 * array.size - 1).bit_length()).data
            return np.frombuffer(kept, np.uint16, array.size).reshape(array.shape)
    return private(call.collective, array.shape, np.dtype(np.uint16))
