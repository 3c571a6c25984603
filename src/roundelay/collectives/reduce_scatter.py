"""Reduce-scatter: everyone's data is reduced and rank r ends with block r of the result.

The inverse of all-gather; together they make an all-reduce.

>>> print(reduce_scatter.picture(3))
         before       after
rank 0   a0  b0  c0   a0+a1+a2
rank 1   a1  b1  c1   b0+b1+b2
rank 2   a2  b2  c2   c0+c1+c2
"""

from roundelay.collectives._base import Collective

__all__ = ["reduce_scatter"]

reduce_scatter = Collective(
    name="reduce_scatter",
    blocks=lambda size: size,
    before=lambda size, root, rank: range(size),
    after=lambda size, root, rank: {rank: range(size)},
    reduces=True,
)
