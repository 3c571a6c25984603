"""What operations on divided tensors are given beside these, in words that ranks can compare.

Each rank computes on its own piece, so that nothing of it shows whether all were given the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from roundelay.training.fingerprint import mark_of
from roundelay.training.shards.shard import Shard

__all__ = ["digest", "operation", "tensors_in", "told", "written_by", "wrote"]

LONGEST = 120  # letters of an operation, of which the rest is a number
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)
#: What leaves nothing of what was there.
OVERWRITE = {"copy_", "fill_", "zero_"}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure."""
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator of torch's writes into."""
    found = []
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has no other name
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return tensors_in(found)


@torch.no_grad()
def digest(tensor: torch.Tensor) -> int:
    """Return a number of all bits of a tensor, which changes with any of them.

    >>> [digest(one) == digest(torch.ones(3)) for one in (torch.ones(3), torch.zeros(3))]
    [True, False]
    """
    plain = tensor.detach()
    plain = plain if plain.layout == torch.strided else plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    mark = mark_of(plain.resolve_neg().contiguous().reshape(-1))
    return zlib.crc32(f"{tuple(tensor.shape)} {int(mark)}".encode())


def told(value: Any) -> str:  # Any: what operations are given
    """Say what an operation was given, alike on ranks that gave the same."""
    if isinstance(value, Shard):
        past = value.past[0]
        what = f"shard {past:08x}" if past else f"the {value.kind} of {value.home.name}"
        return f"{what} at {value.path:08x}" if value.path else what
    if isinstance(value, torch.Tensor):
        return _tensor_told(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(told, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {told(one)}' for key, one in value.items())}}}"
    return type(value).__name__


def _tensor_told(tensor: torch.Tensor) -> str:
    if tensor.is_meta:  # of which there is only the form
        return f"{tensor.dtype}{list(tensor.shape)}"
    small = tensor.dim() == 0 and not tensor.is_quantized
    return repr(tensor.item()) if small else f"tensor {digest(tensor):08x}"


def operation(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], written: Collection[Any] = ()
) -> str:
    """Say an operation and what it was given, but for what it writes into."""
    values = [one for one in args if not any(one is other for other in written)]
    words = [*map(told, values), *(f"{key}={told(one)}" for key, one in kwargs.items())]
    text = ", ".join(words)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… {zlib.crc32(text.encode()):08x}"
    return f"{name}({text})"


def wrote(shard: Shard, what: str) -> None:
    """Tell whose elements these are that they were written; what is nobody's keeps it in mind."""
    if shard.lives:
        shard.wrote(what)
    else:
        name = what.partition("(")[0]
        shard.past[0] = zlib.crc32(what.encode(), 0 if name in OVERWRITE else shard.past[0])
