"""Reduce: the root ends with the reduction of everyone's data; the others keep theirs.

>>> print(reduce.picture(3))
         before   after
rank 0   a0       a0+a1+a2
rank 1   a1       -
rank 2   a2       -
"""

from roundelay.collectives._base import Collective

__all__ = ["reduce"]

reduce = Collective(
    name="reduce",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0],
    after=lambda size, root, rank: {0: range(size)} if rank == root else {},
    rooted=True,
    reduces=True,
)
