"""Scatter: the root hands a different block to every rank.

>>> print(scatter.picture(3))
         before       after
rank 0   a0  b0  c0   a0
rank 1   -            b0
rank 2   -            c0
"""

from roundelay.collectives._base import Collective

__all__ = ["scatter"]

scatter = Collective(
    name="scatter",
    blocks=lambda size: size,
    before=lambda size, root, rank: range(size) if rank == root else [],
    after=lambda size, root, rank: {rank: [root]},
    rooted=True,
)
