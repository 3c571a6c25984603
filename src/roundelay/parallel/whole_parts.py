"""How the whole is gathered of which ranks have parts, and how gradients go back to these."""

from __future__ import annotations

from collections.abc import Callable

import torch

from roundelay.errors import CollectiveMismatch
from roundelay.parallel import functions
from roundelay.parallel.expert.direct_gradients import by_ranks, count_whole
from roundelay.parallel.part import marked, part_of, plain, whole_shape
from roundelay.parallel.passes import label_of, number_of
from roundelay.parallel.sharding import Sharding

__all__ = ["entered", "local_of", "shared", "whole_of"]

OPENED = "opened"  # how the graph of a pass calls it where the whole of a parameter is gathered


def local_of(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as an ordinary tensor, in autograd's graph; of shards, all of it."""
    found = x.view_as(x)
    gathered: Callable[[], torch.Tensor] | None = getattr(found, "full", None)
    return plain(found) if gathered is None else gathered()


def whole_of(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return what ranks have parts of. Each gets its part of the gradient.

    Where ranks have the same loss, it is there. Where they have rows of their own, all take part.
    """
    sharding = part_of(x)
    if sharding is None:
        return x
    local = local_of(entered(x))
    number_of(sharding.comm)  # so that the labelled one counts on
    comm = sharding.comm.labelled(label_of(f"{name} of parts", sharding.number))
    collect = functions.all_gather if sharding.has_rows else functions.gather
    try:
        whole = collect(local, comm, sharding.dim, sharding.counts)
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"{error}\nThis rank computed {name}() of a parameter, number {sharding.number} of "
            f"those that it has parts of along {sharding.axis}, shape {whole_shape(x)}. That is "
            f"computed from the parts of all ranks: all of them ask for it, in the same order."
        ) from None
    if not sharding.has_rows:
        functions.by(f"{name}()", whole, OPENED)
    order = [at for pieces in sharding.pieces for piece in pieces for at in range(*piece)]
    if order == [*range(len(order))]:
        return whole
    places = torch.tensor(order, device=whole.device).argsort()
    return whole.index_select(sharding.dim, places)


def entered(x: torch.Tensor) -> torch.Tensor:
    """Return what goes into the graph: of an expert, its gradients counted as those of tokens."""
    sharding = part_of(x)
    enters = sharding is not None and sharding.by == "experts" and torch.is_grad_enabled()
    if not enters or not x.requires_grad or not isinstance(x, torch.nn.Parameter):
        return x
    if not hasattr(x, "home"):  # a shard's parameter has been seen before
        count_whole(x)
    divided = by_ranks(local_of(x), sharding.comm.size)  # type: ignore[union-attr]
    return marked(divided, sharding)  # type: ignore[arg-type]


def shared(x: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Return what all ranks have alike, to be used on parts: its gradient is that of all."""
    if sharding.has_rows or not torch.is_grad_enabled() or not x.requires_grad:
        return x
    number_of(sharding.comm)  # as in whole_of
    return functions.copy(x, sharding.comm.labelled(label_of("beside parts", sharding.number)))
