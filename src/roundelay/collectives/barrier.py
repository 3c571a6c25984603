"""Barrier: nobody leaves before everybody came; no data, only the news of who has come.

Hearing twice from a rank is as good as once, so the contract is idempotent.

>>> print(barrier.picture(3))
         before   after
rank 0   a0       a0 a1 a2
rank 1   a1       a0 a1 a2
rank 2   a2       a0 a1 a2
"""

from roundelay.collectives._base import Collective

__all__ = ["barrier"]

barrier = Collective(
    name="barrier",
    blocks=lambda size: 1,
    before=lambda size, root, rank: [0],
    after=lambda size, root, rank: {0: range(size)},
    reduces=True,
    idempotent=True,
)
