"""Which forward pass a collective of backward belongs to, so that ranks never mix two of them.

Backward passes that ranks run in different orders would exchange gradients of different losses:
their collectives look alike. So each carries the number of its forward pass as a label.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Protocol
from weakref import WeakKeyDictionary
from zlib import crc32

import torch

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch

__all__ = [
    "OutputWatch",
    "calling_layer",
    "going_back",
    "label_of",
    "layer_number",
    "number_of",
    "watch_whole_gradients",
    "whole_gradients_of",
]

# Source lines in errors are the user's, not those of torch between him and us.
_core.skip_package(f"{Path(torch.__file__).parent}/")


def label_of(call: str, number: int = 0) -> int:
    """Return a label for a call of ranks, so that another one in its place is told."""
    return 1 + (crc32(call.encode()) + number) % ((1 << 25) - 1)


def number_of(comm: Communicator) -> int:
    """Return the number of a forward pass over ranks: all ranks that pass there have the same."""
    passes: count[int] = vars(comm).setdefault("forward_passes", count(1))
    return next(passes)


class OutputWatch(Protocol):
    """Who compares the gradients of what all ranks have whole."""

    def note_output(self, layer: str, number: int, grad: torch.Tensor) -> None:
        """Look at the gradient of what a layer has put together in a numbered forward pass."""


def watch_whole_gradients(comm: Communicator, watch: OutputWatch | None) -> None:
    """Have gradients of forward passes over these ranks, from here on, be shown to somebody."""
    vars(comm)["whole_gradients"] = watch


def whole_gradients_of(comm: Communicator) -> OutputWatch | None:
    """Return who compares the gradients of a forward pass that goes on now, if anybody does."""
    watch: OutputWatch | None = vars(comm).get("whole_gradients")
    return watch


def layer_number(comm: Communicator, layer: torch.nn.Module) -> int:
    """Return which one a layer is of those that call these ranks, by who did so first."""
    layers: WeakKeyDictionary[torch.nn.Module, int]
    # A number is used once: ranks let go of layers at different times.
    layers, numbers = vars(comm).setdefault("layers", (WeakKeyDictionary(), count(1)))
    if layer not in layers:
        layers[layer] = next(numbers)
    return layers[layer]


def calling_layer(comm: Communicator) -> str:
    """Return the innermost module in whose forward we are, alike on ranks that are in the same."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - python's name
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__} {layer_number(comm, owner)}"
        frame = frame.f_back
    return "none"


@contextmanager
def going_back(
    call: str, comm: Communicator, number: int, layer: str = ""
) -> Iterator[Communicator]:
    """Have ranks by which the gradients of one forward pass are exchanged, and of no other."""
    try:
        yield comm.labelled(label_of(call + layer, number))
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"{error}\nThis rank was in the backward pass of {call}{layer and f' ({layer})'}, of "
            f"forward pass {number} over these ranks; every label stands for another pass, or for "
            f"another layer. Run the backward passes of several losses in the same order on every "
            f"rank, and call the same layers: ranks that skip some at random need the same seed."
        ) from None
