"""Has an optimizer show divided parameters, while it steps on this rank's pieces of them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from roundelay.training._shard_groups import Groups
from roundelay.training._shard_parameter import ShardParameter
from roundelay.training._zero_flats import Flat

if TYPE_CHECKING:
    from roundelay.training._zero_parts import Parts

__all__ = ["hand_out"]


def hand_out(parts: Parts) -> None:
    """Point the optimizer of a model at its divided parameters."""
    weak = weakref.ref(parts)

    def elements(flat: Flat, index: int, piece: torch.Tensor) -> torch.Tensor:
        alive = weak()
        if alive is not None:
            alive.take_edit(flat, index)
        return piece

    def wrote(flat: Flat, index: int) -> None:
        alive = weak()
        if alive is not None and not alive.stepping:
            flat.publish(index)

    found: dict[int, tuple[Flat, torch.nn.Parameter | None]] = {}
    for flat in parts.trained:
        stepped = {piece.index: one for piece, one in zip(flat.pieces, flat.stepped, strict=True)}
        for place in flat.layout.places:
            found[place.index] = flat, stepped.get(place.index)
    for index, one in enumerate(parts.setup.parameters):
        flat, bare = found[index]
        if bare is None:
            bare = torch.nn.Parameter(flat.piece(flat.master, index))
        parts.bare.append(bare)
        parts.shown.append(ShardParameter(
            flat.homes[index], partial(elements, flat, index, bare.detach().view(-1)),
            one.tensor.shape, dtype=bare.dtype, kind="parameter",
            wrote=partial(wrote, flat, index), requires_grad=True,
        ))  # fmt: skip
    for number, optimizer in enumerate(parts.setup.optimizer.all):
        mine = [at for at, one in enumerate(parts.setup.parameters) if one.owner == number]
        Groups(optimizer, [parts.shown[at] for at in mine], [parts.bare[at] for at in mine])
