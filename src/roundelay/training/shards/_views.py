"""Views of divided tensors: what is written into them goes to where elements lie."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from roundelay.training.shards.shard import Shard

#: Views that keep all elements in their order.
RESHAPES = {
    "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "alias", "detach",
    "lift_fresh",
}  # fmt: skip

Operator = Any  # torch's operators have no public type


def is_view(func: Operator) -> bool:
    """Tell whether an operation gives a view of its first argument."""
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in func._schema.arguments  # noqa: SLF001 - has no other name
    )


def view_of(
    func: Operator, name: str, shard: Shard, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a view: of the piece where elements stay in their order, else of the whole."""
    meta = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta")
    like = func(meta, *rest, **kwargs)
    if name in RESHAPES and shard.of is None:
        if like.dtype == shard.dtype:
            return shard.reshaped(like.shape)
        if like.dtype.itemsize == shard.dtype.itemsize:
            return shard.reshaped(like.shape, shard.piece.view(like.dtype))
    root, before = shard.of or (shard, same)
    path = zlib.crc32(f"{name} {rest} {kwargs}".encode(), shard.path)

    def make(one: torch.Tensor, at: int | None = None) -> Shard:
        def view(whole: torch.Tensor) -> torch.Tensor:
            found = func(before(whole), *rest, **kwargs)
            made: torch.Tensor = found if at is None else found[at]
            return made

        kind = shard.kind if shard.of is not None else f"view of the {shard.kind}"
        return Shard(root.home, _no_piece, one.shape, dtype=one.dtype, device=shard.device,
                     kind=kind, of=(root, view), strides=one.stride(), past=root.past,
                     path=path)  # fmt: skip

    if isinstance(like, torch.Tensor):
        return make(like)
    return [make(one, at) for at, one in enumerate(like)]


def same(whole: torch.Tensor) -> torch.Tensor:
    """Return it as it is."""
    return whole


def _no_piece() -> torch.Tensor:
    raise RuntimeError("a view of a divided tensor is computed from the whole one")  # not reached
