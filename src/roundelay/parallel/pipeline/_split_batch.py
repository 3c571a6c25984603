"""Batches into micro-batches, and what their form is as one number that ranks compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def form_number(value: Any) -> int:
    """Return a number for the shapes and dtypes of a batch; 0 where there is none."""
    if value is None:
        return 0
    said = repr([(tuple(each.shape), str(each.dtype)) for each in tensors_in(value)])
    return 1 + zlib.crc32(said.encode())


def rows_of(what: str, value: Any) -> int:
    """Return how many rows a batch has; all of its tensors have as many."""
    counts = {each.size(0) if each.dim() else 0 for each in tensors_in(value)}
    if len(counts) != 1 or 0 in counts:
        raise InvalidArgumentError(
            f"{what} of a pipeline has tensors with the same number of rows, at least one, not "
            f"{sorted(counts) or type(value).__name__}."
        )
    return counts.pop()


def split_batch(value: Any, parts: int) -> list[Any]:
    """Cut every tensor of a batch into so many parts of its rows."""
    if isinstance(value, torch.Tensor):
        return list(value.chunk(parts)) if parts > 1 else [value]
    if isinstance(value, dict):
        cut = {key: split_batch(each, parts) for key, each in value.items()}
        return [{key: each[at] for key, each in cut.items()} for at in range(parts)]
    if isinstance(value, (tuple, list)):
        pieces = [split_batch(each, parts) for each in value]
        listed = [[each[at] for each in pieces] for at in range(parts)]
        return [tuple(each) for each in listed] if isinstance(value, tuple) else listed
    return [value] * parts


def joined(values: list[Any]) -> Any:
    """Put the outputs of micro-batches together: tensors by rows, tuples and dicts one by one."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else torch.stack(values)
    if isinstance(first, dict):
        return {key: joined([each[key] for each in values]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(list(each)) for each in zip(*values, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(each)) for each in zip(*values, strict=True))
    return values
