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
    told = (
        f"Measured on {measured.cores} cores, Python {measured.python}, with `{measured.command}`."
    )
    return "\n".join([*lines, "", told, ""])
