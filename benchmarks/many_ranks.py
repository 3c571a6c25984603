"""From when on do two-shot and pipeline pay? Beside the direct algorithms and MPI, in one run.

Reduce, scan and exscan, float32, every algorithm by its name. The defaults in tuning.py follow what
was found on 16 cores. Writes results/many_ranks.json.
"""

from __future__ import annotations

from collections.abc import Iterator

from _contest import Asked, asked, contest

from roundelay.bench import Case, Spec

SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20)
ALGORITHMS = {
    "reduce": ("reduce_direct", "reduce_two_shot"),
    "scan": ("scan_direct", "scan_pipeline"),
    "exscan": ("exscan_direct", "exscan_pipeline"),
}


def runs(wanted: Asked) -> Iterator[tuple[str, Spec]]:
    """Yield one run for each number of ranks and collective, with its title."""
    for size in wanted.ranks:
        for collective in wanted.collectives:
            cases = tuple(Case(collective, nbytes) for nbytes in wanted.sizes)
            contenders = (*ALGORITHMS[collective], *wanted.peers)
            spec = Spec(size=size, cases=cases, contenders=contenders, floor=False,
                        seconds=wanted.seconds)  # fmt: skip
            yield f"{collective} on {size} ranks", spec


if __name__ == "__main__":
    options = asked(__doc__, "many_ranks", ranks="4,8", peers="mpi", collectives=ALGORITHMS,
                    sizes=SIZES)  # fmt: skip
    contest(runs(options), options)
