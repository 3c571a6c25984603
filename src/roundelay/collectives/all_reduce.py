"""All-reduce: everyone ends with the reduction of everyone's data.

The gradient synchronisation of data-parallel training.

>>> print(all_reduce.picture(3))
         before   after
rank 0   a0       a0+a1+a2
rank 1   a1       a0+a1+a2
rank 2   a2       a0+a1+a2
"""

from roundelay.collectives._base import Collective

__all__ = ["all_reduce"]

all_reduce = Collective(
    name="all_reduce",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0],
    after=lambda size, root, rank: {0: range(size)},
    reduces=True,
)
