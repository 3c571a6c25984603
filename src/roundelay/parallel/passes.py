"""Which forward pass a collective of backward belongs to, so that ranks never mix two of them.

Backward passes that ranks run in different orders would exchange gradients of different losses:
their collectives look alike. So each carries the number of its forward pass as a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from zlib import crc32

import torch

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch

__all__ = ["going_back", "label_of", "number_of"]

# Source lines in errors are the user's, not those of torch between him and us.
_core.skip_package(f"{Path(torch.__file__).parent}/")


def label_of(call: str, number: int = 0) -> int:
    """Return a label for a call of ranks, so that another one in its place is told."""
    return 1 + (crc32(call.encode()) + number) % ((1 << 25) - 1)


def number_of(comm: Communicator) -> int:
    """Return the number of a forward pass over ranks: all ranks that pass there have the same."""
    passes: count[int] = vars(comm).setdefault("forward_passes", count(1))
    return next(passes)


@contextmanager
def going_back(call: str, comm: Communicator, number: int) -> Iterator[Communicator]:
    """Have ranks by which the gradients of one forward pass are exchanged, and of no other."""
    try:
        yield comm.labelled(label_of(call, number))
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"{error}\nThis rank was in the backward pass of {call}, of forward pass {number} over "
            f"these ranks; every label stands for another pass. Run the backward passes of several "
            f"losses in the same order on every rank."
        ) from None
