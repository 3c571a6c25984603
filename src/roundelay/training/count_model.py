"""A real model as the planner sees it: its tensors, counted without any memory for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundelay.errors import InvalidArgumentError
from roundelay.planning import ModelShape
from roundelay.training.strategies.zero.units import find_units

__all__ = ["count_model"]

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
HEAD_WIDTH = 128


def count_model(make: Callable[[], Any]) -> ModelShape:  # Any: a model, or a mistake to be named
    """Make a model on the meta device and count its parameters, by the units that ZeRO-3 gathers.

    What repeats most are its layers. Width, heads and vocabulary are read off its modules.
    """
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"The function must return a torch.nn.Module, not {type(model).__name__}."
        )
    units = find_units(model, None)
    sizes = [tuple(tensor.numel() for tensor in unit.parameters) for unit in units]
    repeated = Counter(size for size in sizes[1:] if size)
    layer = max(repeated, key=lambda size: (repeated[size] * sum(size), size), default=())
    if not layer:
        layer, sizes = sizes[0], []
    layers = max(1, repeated[layer])
    around = [numel for size in sizes if size != layer for numel in size]
    if not sum(layer):
        raise InvalidArgumentError("The model has no parameters: there is nothing to plan.")
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    table = max(tables, key=lambda one: one.num_embeddings, default=None)
    hidden = _width(layer) if table is None else int(table.embedding_dim)
    rows = 0 if table is None else int(table.num_embeddings)
    around_layers = {id(one) for one in units[0].parameters}
    own_head = any(isinstance(one, nn.Linear) and one.out_features == rows
                   and id(one.weight) in around_layers
                   and table is not None and one.weight is not table.weight
                   for one in model.modules())  # fmt: skip
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=_heads(model, hidden),
        vocabulary=rows,
        inputs=tuple(around),
        layer=layer,
        outputs=(),
        shared=0 if own_head else rows * hidden,
    )


def _width(layer: tuple[int, ...]) -> int:
    """Guess the width of a layer of 12h² elements."""
    return max(1, round(math.sqrt(sum(layer) / 12)))


def _heads(model: nn.Module, hidden: int) -> int:
    """Find how many heads attention has, where a module or a config says so."""
    homes = [*model.modules(), *(one.config for one in model.modules() if hasattr(one, "config"))]
    for home in homes:
        for name in HEADS:
            found = getattr(home, name, None)
            if type(found) is int and found > 0 and hidden % found == 0:
                return found
    wanted = max(1, hidden // HEAD_WIDTH)
    return next(count for count in range(wanted, 0, -1) if hidden % count == 0)
