"""Has an optimizer show divided parameters, while it steps on this rank's pieces of them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from roundelay.training.shards.groups import ShardedGroups
from roundelay.training.shards.parameter import OptimizerParameter
from roundelay.training.strategies.zero._flat_parameter import FlatParameter

if TYPE_CHECKING:
    from roundelay.training.strategies.zero._partition import Partition


def hand_out(partition: Partition) -> None:
    """Point the optimizer of a model at its divided parameters."""
    weak = weakref.ref(partition)

    def elements(flat: FlatParameter, index: int, piece: torch.Tensor) -> torch.Tensor:
        alive = weak()
        if alive is not None:
            alive.take_edit(flat, index)
        return piece

    def wrote(flat: FlatParameter, index: int, what: str) -> None:
        alive = weak()
        home = flat.homes[index]
        home.note(f"{what} into the parameter {home.name}")
        if alive is not None and not alive.stepping:
            flat.publish(index)

    found: dict[int, tuple[FlatParameter, torch.nn.Parameter | None]] = {}
    for flat in partition.trained:
        stepped = {piece.index: one for piece, one in zip(flat.pieces, flat.stepped, strict=True)}
        for place in flat.layout.places:
            found[place.index] = flat, stepped.get(place.index)
    for index, parameter in enumerate(partition.setup.parameters):
        flat, bare = found[index]
        if bare is None:
            bare = torch.nn.Parameter(flat.piece(flat.master, index))
        partition.bare.append(bare)
        partition.shown.append(OptimizerParameter(
            flat.homes[index], partial(elements, flat, index, bare.detach().view(-1)),
            parameter.tensor.shape, dtype=bare.dtype, kind="parameter",
            wrote=partial(wrote, flat, index), requires_grad=True,
        ))  # fmt: skip
    for number, optimizer in enumerate(partition.setup.optimizer.all):
        mine = [
            at
            for at, parameter in enumerate(partition.setup.parameters)
            if parameter.owner == number
        ]
        ShardedGroups(
            optimizer, [partition.shown[at] for at in mine], [partition.bare[at] for at in mine]
        )
