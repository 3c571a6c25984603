"""Ranks compare what they are about to do, before Gloo does it; what is small is done on the way.

Every call begins with a record that each rank shows to all: a number for what it plans, and its
data, if that is short. Then a barrier is over, and an all-reduce is a fold of what has come, in
the order of the ranks. So short calls cost no more than without the comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roundelay.engines._call import CollectiveCall
from roundelay.engines._call_signature import CallSignature, encode, mismatch
from roundelay.engines._over_messages import native_fold
from roundelay.reductions import Array

HEAD = 64  # bytes for the number; what follows keeps its alignment
SHORT = 1024  # bytes of data that travel along: all fits into one packet


class GlooAgreement:
    """Compares the plans of the ranks of one process group."""

    def __init__(self, torch: Any, size: int) -> None:
        self._torch, self._size = torch, size
        self._mine = np.zeros(HEAD + SHORT, np.uint8)

    def settle(self, group: Any, call: CollectiveCall, algorithm: str | None) -> bool:
        """Go on if all ranks plan the same, and tell whether that was all there is to do.

        Otherwise raise, on all of them, who plans what.
        """
        if self._size == 1 or call.signature is None:
            return False
        given = _short(call) if algorithm is None else None
        records = self._compared(group, call.signature, given)
        if given is not None and call.output is not None:
            rows = [record.view(given.dtype) for record in records[:, : given.nbytes]]
            fold = native_fold(call.op, call.dtype, self._size)
            call.output.reshape(-1)[:] = fold(rows, True, None)  # noqa: FBT003 - a fold's form
        return given is not None or (call.collective == "barrier" and algorithm is None)

    def agree(self, group: Any, signature: CallSignature) -> None:
        """Go on if all ranks plan the same; otherwise raise, on all of them, who plans what."""
        if self._size > 1:
            self._compared(group, signature, None)

    def _compared(self, group: Any, signature: CallSignature, given: Array | None) -> Array:
        """Return what the ranks gave along."""
        self._mine[:8].view(np.int64)[0] = signature.number
        if given is not None:
            self._mine[HEAD : HEAD + given.nbytes] = given.view(np.uint8)
        records = self._gathered(group, self._mine)
        if np.any(records[:, :8] != self._mine[:8]):
            raise mismatch(self._gathered(group, encode(signature)))
        return records[:, HEAD:]

    def _gathered(self, group: Any, mine: Array) -> Array:
        every = np.empty((self._size, mine.size), np.uint8)
        output, given = map(self._torch.from_numpy, (every.reshape(-1), mine))
        group._allgather_base(output, given).wait()  # noqa: SLF001 - torch's name for it
        return every


def _short(call: CollectiveCall) -> Array | None:
    """Return what a rank brings to an all-reduce, if it is short enough to travel along."""
    if call.collective != "all_reduce" or call.input is None or call.input.nbytes > SHORT:
        return None
    return call.input.reshape(-1)
