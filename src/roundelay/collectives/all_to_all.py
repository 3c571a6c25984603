"""All-to-all: rank s sends its block d to rank d, for every s and d; a transpose.

Block `s * size + d` is what s has for d. How tokens reach their experts.

>>> print(all_to_all.picture(3))
         before       after
rank 0   a0  b0  c0   a0  d1  g2
rank 1   d1  e1  f1   b0  e1  h2
rank 2   g2  h2  i2   c0  f1  i2
"""

from roundelay.collectives._base import Collective

__all__ = ["all_to_all"]

all_to_all = Collective(
    name="all_to_all",
    blocks=lambda size: size * size,
    before=lambda size, root, rank: range(rank * size, (rank + 1) * size),
    after=lambda size, root, rank: {src * size + rank: [src] for src in range(size)},
    # What rank r gets from s does not lie where what it has for s lay.
    in_place=False,
)
