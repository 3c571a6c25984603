"""Scan: rank r ends with the reduction of ranks 0 to r; a running sum over the ranks.

>>> print(scan.picture(3))
         before   after
rank 0   a0       a0
rank 1   a1       a0+a1
rank 2   a2       a0+a1+a2
"""

from roundelay.collectives._base import Collective

__all__ = ["scan"]

scan = Collective(
    name="scan",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0],
    after=lambda size, root, rank: {0: range(rank + 1)},
    reduces=True,
)
