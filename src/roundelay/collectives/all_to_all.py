"""All-to-all: rank s sends its block d to rank d, for every s and d; a transpose.

Block `s * size + d` is what s has for d. How tokens reach their experts.

>>> print(all_to_all.picture(3))
         before          after
rank 0   0→0  0→1  0→2   0→0  1→0  2→0
rank 1   1→0  1→1  1→2   0→1  1→1  2→1
rank 2   2→0  2→1  2→2   0→2  1→2  2→2
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
    named=lambda size, block: f"{block // size}→{block % size}",
)
