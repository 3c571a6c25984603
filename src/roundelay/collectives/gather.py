"""Gather: the root collects a block from every rank, in rank order; the inverse of scatter.

>>> print(gather.picture(3))
         before   after
rank 0   a0       a0  b1  c2
rank 1   b1       -
rank 2   c2       -
"""

from roundelay.collectives._base import Collective

__all__ = ["gather"]

gather = Collective(
    name="gather",
    blocks=lambda size: size,
    before=lambda size, root, rank: [rank],
    after=lambda size, root, rank: (
        {block: [block] for block in range(size)} if rank == root else {}
    ),
    rooted=True,
)
