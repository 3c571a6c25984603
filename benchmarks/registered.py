"""What is it worth to register an array? All-reduce on ordinary, registered and arena arrays.

In the same processes and rounds, on two and four ranks, float32. Writes results/registered.json.
"""

from __future__ import annotations

from collections.abc import Iterator

from _contest import ALL_OURS, Asked, asked, contest

from roundelay.bench import Case, Spec

SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)


def runs(wanted: Asked) -> Iterator[tuple[str, Spec]]:
    """Yield what is measured in the same processes, with its title."""
    cases = tuple(Case(name, nbytes) for name in wanted.collectives for nbytes in wanted.sizes)
    for size in wanted.ranks:
        yield f"{size} ranks", Spec(size=size, cases=cases, contenders=ALL_OURS)


if __name__ == "__main__":
    options = asked(__doc__, "registered", ranks="2,4", collectives=["all_reduce"], sizes=SIZES)
    contest(runs(options), options)
