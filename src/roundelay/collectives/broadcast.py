"""Broadcast: everyone ends with the root's data.

How parameters get their common start.

>>> print(broadcast.picture(3))
         before   after
rank 0   a0       a0
rank 1   -        a0
rank 2   -        a0
"""

from roundelay.collectives._base import Collective

__all__ = ["broadcast"]

broadcast = Collective(
    name="broadcast",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0] if rank == root else [],
    after=lambda size, root, rank: {0: [root]},
    rooted=True,
)
