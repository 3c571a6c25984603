"""How fast are the other collectives from Python? Beside MPI, in the same processes and rounds.

Two and four ranks, float32; ours on private arrays and on those from `comm.empty`. Without MPI ours
are measured alone. Writes results/collectives.json.
"""

from __future__ import annotations

from _contest import OURS, asked, contest

from roundelay.bench import Case, Spec
from roundelay.collectives import collectives

SIZES = (8, 64 << 10, 1 << 20, 8 << 20)
#: Every collective but all_reduce, which has a benchmark of its own.
CASES = tuple(
    Case(name, nbytes)
    for name in collectives.names()
    if name != "all_reduce"
    for nbytes in (SIZES if name != "barrier" else (0,))
)

if __name__ == "__main__":
    options = asked(__doc__, "collectives", ranks="2,4", peers="mpi")
    contenders = (*OURS, *options.peers)
    runs = (
        (f"{size} ranks", Spec(size=size, cases=CASES, contenders=contenders, floor=False))
        for size in options.ranks
    )
    contest(runs, options)
