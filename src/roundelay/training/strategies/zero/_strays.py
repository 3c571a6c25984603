"""Parameters that were given other memory than their place in a row, by `p.data = …` say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundelay.errors import InvalidArgumentError
from roundelay.training._buckets import BucketPlace
from roundelay.training._setup import Parameter
from roundelay.training.strategies.zero._flat_parameter import FlatParameter


def strays(parameters: Sequence[Parameter], flat: FlatParameter) -> Iterator[BucketPlace]:
    """Yield the places of parameters that lie elsewhere."""
    begin, width = flat.whole.data_ptr(), flat.whole.itemsize
    for place in flat.layout.places:
        at = parameters[place.index].tensor.data_ptr()
        if at != begin + place.start * width and place.numel:
            yield place


def take_strays(parameters: Sequence[Parameter], flats: Sequence[FlatParameter]) -> None:
    """Take them back into their rows, with the values that they have."""
    rows = {one.whole.untyped_storage().data_ptr() for one in flats}
    found = []
    for flat, place in [(one, place) for one in flats for place in strays(parameters, one)]:
        parameter = parameters[place.index]
        tensor, there = parameter.tensor, flat.view(place)
        if (tensor.shape, tensor.dtype) != (there.shape, there.dtype):
            raise InvalidArgumentError(
                f"The parameter {parameter.name} was {there.dtype} of shape "
                f"{tuple(there.shape)} at prepare and is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} now. Change shapes and dtypes before prepare."
            )
        values = tensor.detach()
        swapped = values.untyped_storage().data_ptr() in rows  # `p.data = q.data`
        found.append((tensor, there, values.clone() if swapped else values))
    for tensor, there, values in found:
        there.copy_(values)
        tensor.data = there
