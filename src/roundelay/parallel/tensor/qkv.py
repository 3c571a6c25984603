"""Queries, keys and values in one linear layer: cut by heads, so that a rank has all of its own."""

from __future__ import annotations

import math
from typing import ClassVar

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.tensor.column import Column

__all__ = ["Qkv"]


class Qkv(Column):
    """Cut each of the three: `qkv:head_dim`, or with groups of queries `qkv:head_dim*groups`.

    The first number is the width of a head, the others how many heads of queries share one of keys
    and values. Outputs lie as all queries, all keys, all values.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"whole"})

    def blocks(self, features: int) -> list[list[int]]:
        """Return every rank's queries, keys and values: heads that belong together stay so."""
        width, *groups = self.factors() or [1]
        queries = math.prod(groups)
        heads, rest = divmod(features, width * (queries + 2))
        if rest:
            raise InvalidArgumentError(
                f"{self.place.label} has {features} outputs, which are not queries, keys and "
                f"values of heads of width {width}"
                + (f" with {queries} heads of queries for one of keys." if groups else ".")
            )
        keys = self.counts(heads * width, width)
        return [[count * queries for count in keys], keys, keys]
