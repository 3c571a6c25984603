"""How fast is every collective from Python? Beside the MPIs that are here, in the same rounds.

Float32, on ordinary arrays, and for all-reduce also on those from `comm.empty`. Sizes are those of
the whole message: the blocks of gathering and scattering calls are that divided by the ranks. Open
MPI is `mpi`; MPICH and Intel MPI are found by their mpiexec.hydra on PATH, and have runs of their
own, since a process can hold one MPI only. Who is not here is said and left out. Writes
results/collectives.json, from which `make docs` makes the table of who is ahead where.
"""

from __future__ import annotations

from collections.abc import Iterator

from _contest import OURS, Asked, asked, contest, together

from roundelay.bench import Case, Spec

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather",
    "scatter", "all_to_all", "reduce_scatter", "scan", "barrier",
)  # fmt: skip


def runs(wanted: Asked) -> Iterator[tuple[str, Spec]]:
    """Yield what is measured in the same processes, with its title."""
    both = tuple(name for name in wanted.collectives if name == "all_reduce")
    rest = tuple(name for name in wanted.collectives if name != "all_reduce")
    for size in wanted.ranks:
        for beside, peers in together(wanted.peers):
            for names, ours in ((both, OURS), (rest, OURS[:1])):
                cases = tuple(Case(name, each) for name in names for each in sizes(name, wanted))
                spec = Spec(size=size, cases=cases, contenders=(*ours, *peers), floor=False,
                            seconds=wanted.seconds)  # fmt: skip
                if cases:
                    yield f"{size} ranks{beside}", spec


def sizes(name: str, wanted: Asked) -> list[int]:
    """Return how many bytes it is measured on; a barrier has none."""
    return [0] if name == "barrier" else wanted.sizes


if __name__ == "__main__":
    options = asked(__doc__, "collectives", ranks="2,4", peers="mpi,mpich,intel",
                    collectives=COLLECTIVES, sizes=SIZES, seconds=0.15)  # fmt: skip
    contest(runs(options), options)
