"""Read a schedule from a file, and let the proof say what is wrong with it.

Prints:

    star: keeps its contract, order rank_order
    star, too hasty: stale at rank 1 in step 2
"""

from pathlib import Path

from roundelay.errors import ProofError
from roundelay.schedule import load, prove

for name in ("star", "stale"):
    schedule = load(Path(__file__).parent / "schedules" / f"{name}.json")
    try:
        print(f"{schedule.name}: keeps its contract, order {prove(schedule).order}")
    except ProofError as error:
        for failure in error.failures:
            when = "at the end" if failure.step is None else f"in step {failure.step + 1}"
            where = f"at rank {failure.rank} {when}"
            print(f"{schedule.name}: {failure.kind} {where}")
