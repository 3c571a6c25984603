"""What a trace costs, as benchmarks/trace_cost.py has measured it."""

from __future__ import annotations

from pathlib import Path

import msgspec

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


class Cost(msgspec.Struct, frozen=True):
    """Nanoseconds of one thing: without a trace, with one, and the difference of the two."""

    off_ns: float
    on_ns: float
    more_ns: float
    events: float = 0  # of a step
    least_off_ns: float = 0  # of all rounds
    least_on_ns: float = 0


class TraceCosts(msgspec.Struct, frozen=True):
    """The file of results."""

    command: str
    python: str
    cores: int
    nanoseconds: dict[str, Cost]


def trace_cost(results: Path = RESULTS) -> str:
    """Return the table."""
    path = results / "trace_cost.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/trace_cost.py` does.\n"
    measured = msgspec.json.decode(path.read_bytes(), type=TraceCosts)
    lines = ["| | without (ns) | with (ns) | more (ns) |", "|---|---:|---:|---:|"]
    for name, cost in measured.nanoseconds.items():
        lines.append(f"| {name} | {cost.off_ns:.0f} | {cost.on_ns:.0f} | {cost.more_ns:.0f} |")
    steps = [cost for cost in measured.nanoseconds.values() if cost.events]
    shares = [
        f"A step has {cost.events:.0f} events, which take {100 * cost.more_ns / cost.off_ns:.2f} % "
        f"of it by the median; the quickest steps with and without differ by "
        f"{100 * (cost.least_on_ns / cost.least_off_ns - 1):.2f} %."
        for cost in steps
    ]
    told = (
        f"Measured on {measured.cores} cores, Python {measured.python}, with `{measured.command}`."
    )
    return "\n".join([*lines, "", *shares, told, ""])
