"""Ranks compare what they are about to do, before MPI does it."""

from __future__ import annotations

from typing import Any

import numpy as np

from roundelay.engines._call_signature import LONGEST, CallSignature, encode, mismatch
from roundelay.engines.mpi._progress import Requests, Steps


class MpiAgreement:
    """Compares the plans of the ranks of one MPI communicator."""

    def __init__(self, mpi: Any, comm: Any) -> None:  # without types, see load_mpi
        self._mpi, self._comm = mpi, comm
        self._size: int = comm.Get_size()

    def steps(self, signature: CallSignature) -> Steps:
        """Go on if all ranks plan the same; otherwise raise, on all of them, who plans what."""
        if self._size == 1:
            return
        number = signature.number
        both = np.array([number, -number], np.int64)
        send, kept = [both, self._mpi.INT64_T], np.empty_like(both)
        call = self._comm.Iallreduce(send, [kept, self._mpi.INT64_T], self._mpi.MAX)
        yield [Requests([call], both, kept)]
        if kept[0] == -kept[1]:
            return
        mine, every = encode(signature), np.empty((self._size, LONGEST), np.uint8)
        call = self._comm.Iallgather([mine, self._mpi.BYTE], [every, self._mpi.BYTE])
        yield [Requests([call], mine, every)]
        raise mismatch(every)
