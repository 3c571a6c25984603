"""Exclusive scan: rank r ends with the reduction of ranks 0 to r - 1; rank 0 gets nothing.

Where each rank's part begins, given how much each has.

>>> print(exscan.picture(3))
         before   after
rank 0   a0       -
rank 1   a1       a0
rank 2   a2       a0+a1
"""

from roundelay.collectives._base import Collective

__all__ = ["exscan"]

exscan = Collective(
    name="exscan",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0],
    after=lambda size, root, rank: {0: range(rank)} if rank else {},
    reduces=True,
)
