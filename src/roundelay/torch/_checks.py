"""Sizes that do not go together, told before anybody waits for anybody."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from roundelay.errors import InvalidArgumentError


def times(call: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Refuse a tensor that does not have exactly `size` times the elements of another."""
    if whole.dtype != part.dtype:
        raise InvalidArgumentError(
            f"{call} needs one dtype for input and output, not {whole.dtype} and {part.dtype}."
        )
    if whole.numel() != size * part.numel():
        raise InvalidArgumentError(
            f"{call} on {size} ranks goes between a tensor of n and one of {size} n elements, but "
            f"these have {part.numel()} and {whole.numel()}."
        )


def one_each(call: str, tensors: Sequence[Tensor], size: int) -> None:
    """Refuse a list that does not have one tensor for every rank."""
    if len(tensors) != size:
        raise InvalidArgumentError(
            f"{call} on {size} ranks needs a list of {size} tensors, not of {len(tensors)}."
        )


def lengths(call: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return how many elements go to or come from each rank; no splits mean equal shares."""
    numbers = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if numbers % size:
            raise InvalidArgumentError(
                f"{call} without split sizes needs rows that divide by the {size} ranks, but the "
                f"tensor has {numbers}. Pass input_split_sizes and output_split_sizes."
            )
        splits = [numbers // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != numbers:
        raise InvalidArgumentError(
            f"{call} needs {size} split sizes that add up to the {numbers} rows of the tensor, "
            f"not {list(splits)}."
        )
    row = tensor.numel() // numbers if numbers else 0
    return [rows * row for rows in splits]
