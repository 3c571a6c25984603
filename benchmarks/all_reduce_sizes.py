"""How fast is all-reduce from Python? Beside other libraries, in the same processes and rounds.

Two, four and eight ranks, float32; once on ordinary arrays and once on arrays from `comm.empty`.
Peers that are not installed are left out. A process can hold one MPI only, so MPICH and Intel MPI
have runs of their own. DeepSpeed spins, so that it is left out where there are many more ranks than
cores. Writes results/all_reduce_sizes.json.
"""

from __future__ import annotations

from collections.abc import Iterator

from _contest import OURS, Asked, asked, contest, together

from roundelay import _core
from roundelay.bench import Case, Spec

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
SPINS = "deepspeed"


def runs(wanted: Asked) -> Iterator[tuple[str, Spec]]:
    """Yield what is measured in the same processes, with its title."""
    cases = tuple(Case(name, nbytes) for name in wanted.collectives for nbytes in wanted.sizes)
    for size in wanted.ranks:
        crowded = size > 2 * _core.available_cores()
        found = [name for name in wanted.peers if not (crowded and name == SPINS)]
        for beside, peers in together(found):
            spec = Spec(size=size, cases=cases, contenders=(*OURS, *peers), seconds=wanted.seconds)
            yield f"{size} ranks{beside}", spec


if __name__ == "__main__":
    options = asked(__doc__, "all_reduce_sizes", ranks="2,4,8", collectives=["all_reduce"],
                    sizes=SIZES)  # fmt: skip
    contest(runs(options), options)
