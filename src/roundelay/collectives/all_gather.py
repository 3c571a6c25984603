"""All-gather: everyone collects a block from everyone, in rank order.

How sharded parameters become whole before use.

>>> print(all_gather.picture(3))
         before   after
rank 0   a0       a0  b1  c2
rank 1   b1       a0  b1  c2
rank 2   c2       a0  b1  c2
"""

from roundelay.collectives._base import Collective

__all__ = ["all_gather"]

all_gather = Collective(
    name="all_gather",
    blocks=lambda size: size,
    before=lambda size, root, rank: [rank],
    after=lambda size, root, rank: {block: [block] for block in range(size)},
)
