"""Torch's random numbers on ranks that share layers: the same outside of cut layers, others inside.

Activations that all ranks have must be dropped alike, or ranks go on apart. Of heads, features or
tokens of which each has its own, each drops its own. So ranks begin with one state of torch's
generator, and leave it for numbers of their own where activations are parts.
"""

from __future__ import annotations

import os
import socket
import zlib
from typing import Any

import torch

from roundelay.communicator import Communicator

__all__ = ["RandomNumbers"]

AGAIN = 64  # passes of a layer after which it is seen again whether it draws any


class RandomNumbers:
    """The generator of this rank, and the state that it has where ranks draw alike."""

    def __init__(self, comm: Communicator) -> None:
        #: Threads share one generator, whose numbers they draw in any order.
        self._own = comm.size > 1 and comm.size == len(
            {*comm.all_gather_object((socket.gethostname(), os.getpid()))}
        )
        self._rank = comm.rank
        self._left: tuple[Any, torch.Tensor, torch.Tensor, _Place] | None = None
        self._places: dict[str, _Place] = {}
        if self._own:
            self._share(comm)

    def _share(self, comm: Communicator) -> None:
        """Have all ranks draw what the first of them draws."""
        cuda: Any = torch.cuda  # Any: torch's is not typed
        generators = [torch.default_generator]
        if cuda.is_initialized():
            generators += cuda.default_generators
        states = comm.broadcast_object([one.get_state().numpy().tobytes() for one in generators])
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def leave(self, layer: str, x: torch.Tensor, *, training: bool) -> None:
        """Go on with numbers of this rank's own, from the input of a cut layer on."""
        if not (self._own and training) or self._left is not None or torch.compiler.is_compiling():
            return
        place = self._places.setdefault(layer, _Place())
        place.passes += 1
        if not (place.draws or place.passes % AGAIN == 1):
            return
        generator = _generator(x.device)
        before = generator.get_state()
        # From the state itself, so that what a checkpointed block computes again is the same.
        seed = zlib.crc32(before.numpy().tobytes()) * 4096 + self._rank
        mine = generator.manual_seed(seed).get_state()
        self._left = generator, before, mine, place

    def come_back(self) -> None:
        """Go on with the numbers that all ranks share, behind a cut layer."""
        if self._left is None:
            return
        (generator, before, mine, place), self._left = self._left, None
        place.draws = not torch.equal(generator.get_state(), mine)
        generator.set_state(before)
        if place.draws:  # the next one begins elsewhere
            torch.empty(1, device=generator.device).uniform_(generator=generator)


class _Place:
    """A layer behind which a rank may draw numbers of its own."""

    passes = 0
    draws = False


def _generator(device: torch.device) -> torch.Generator:
    generators = torch.cuda.default_generators if device.type == "cuda" else ()
    return generators[device.index or 0] if generators else torch.default_generator
