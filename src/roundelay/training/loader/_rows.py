"""Whether all ranks have the same rows: a dataset that a program has divided itself is refused.

What tells rows apart is looked at where it lies: lists, arrays and tensors as long as the dataset.
One row is read where no worker processes are to open its files first. Rows that are drawn at random
can't be compared and are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch

DEEPEST = 4  # datasets inside one another
PLAIN = (str, bytes, bool, int, float, complex, np.generic, PathLike, type(None))
LISTED = (list, tuple, range, torch.Tensor, np.ndarray)
HOLDS = (*LISTED, Dataset)
_reading = threading.Lock()  # ranks may be threads, which draw from the same random numbers
OWN_ROWS = (
    "loader needs the same dataset on every rank, of which it gives each its own rows; but those "
    "of rank {ranks} are others than rank 0's. Where a program has divided them itself, by a "
    "Subset, a slice or a shard for each rank, give the whole dataset to all ranks."
)


def compare_rows(comm: Communicator, dataset: Any, *, reads: bool) -> None:  # Any: the user's
    """Raise, on every rank, if the ranks have other rows. Every rank calls it."""
    first = _row(dataset) if reads else ""
    laid = hashlib.blake2b("".join(_laid(dataset, len_of(dataset))).encode()).hexdigest()
    every: list[tuple[str, str]] = comm.all_gather_object((laid, first))
    if all(one == every[0] for one in every):
        return
    # Where a row is another one each time, it says nothing.
    told = [laid, first if reads and first == _row(dataset) else ""]
    every = comm.all_gather_object(tuple(told))
    others = [
        rank for rank, (laid, row) in enumerate(every)
        if laid != every[0][0] or (row and every[0][1] and row != every[0][1])
    ]  # fmt: skip
    if others:
        raise CollectiveMismatch(OWN_ROWS.format(ranks=", ".join(map(str, others))))


def len_of(rows: Any) -> int | None:
    """Return how many there are, if that can be told."""
    try:
        return len(rows)
    except Exception:  # noqa: BLE001 - the user's own, and no matter here
        return None


def _row(dataset: Any) -> str:
    """Return a number for the first row; none where it is drawn at random, or can't be had."""
    with _reading:
        before = _random()
        try:
            found = dataset[0]
        except Exception:  # noqa: BLE001 - the loop tells of it
            return ""
        finally:
            drew = _words(_random()) != _words(before)
            if drew:
                torch.set_rng_state(before[0])
                np.random.set_state(before[1])  # noqa: NPY002 - what datasets draw from
                random.setstate(before[2])
    leaves, form = tree_flatten(found)
    told = "".join([repr(form), *map(_word, leaves)])
    return "" if drew else hashlib.blake2b(told.encode()).hexdigest()


def _random() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - likewise


def _words(states: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    torchs, numpys, pythons = states
    return torchs.numpy().tobytes(), numpys[1].tobytes(), numpys[2:], pythons


def _laid(value: Any, count: int | None, depth: int = 0) -> Iterator[str]:
    """Yield words for the rows that lie in a dataset, without asking it for any."""
    if not count or depth == DEEPEST:
        return
    if isinstance(value, LISTED) and len_of(value) == count:
        yield from (_word(value[at]) for at in (0, count // 2, -1))
    for name, inner in sorted(getattr(value, "__dict__", {}).items()):
        several = isinstance(inner, (tuple, list)) and all(isinstance(one, HOLDS) for one in inner)
        for part in inner if several else [inner]:
            if isinstance(part, HOLDS):
                inside = len_of(part) if isinstance(part, Dataset) else count
                yield from (f"{name} {one}" for one in _laid(part, inside, depth + 1))


def _word(value: Any) -> str:
    """Return what is the same for the same value on every rank; of objects only their class."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        with contextlib.suppress(TypeError, RuntimeError, ValueError):
            array = np.ascontiguousarray(torch.as_tensor(value).detach().cpu().numpy())
            return f"{array.dtype}{array.shape}{hashlib.blake2b(array.data).hexdigest()}"
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "".join(map(_word, value[:3]))
    return type(value).__name__
