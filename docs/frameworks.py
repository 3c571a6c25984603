"""The table of frameworks: which run on Roundelay, by which line, as benchmarks/frameworks.py saw."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["frameworks", "import_cost"]

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "frameworks.json"
SAID = {"passed": "yes, to the last bit", "failed": "no"}


class Row(msgspec.Struct, frozen=True):
    """One framework, and how it went."""

    framework: str
    package: str
    line: str
    program: str
    outcome: str
    why: str
    version: str = "-"


class Cost(msgspec.Struct, frozen=True):
    """What `import torch` takes, in milliseconds."""

    without_ms: float
    with_ms: float
    the_name_ms: float


class Results(msgspec.Struct, frozen=True):
    """The file of results."""

    command: str
    python: str
    cores: int
    ranks: int
    torch: str
    import_cost: Cost
    rows: list[Row]


def _read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def frameworks(path: Path = RESULTS) -> str:
    """Return the table: framework, version, the line, whether losses are gloo's."""
    found = _read(path)
    rows = [
        f"| [{row.framework}](../benchmarks/_frameworks/{row.program}) | {row.package} "
        f"{row.version} | `{row.line}` | {SAID[row.outcome]} |\n"
        for row in found.rows
    ]
    return (
        "| framework | version | what changes | same losses as gloo |\n|---|---|---|---|\n"
        + "".join(rows)
        + f"\nSeen on {found.ranks} ranks, torch {found.torch}, Python {found.python}, with "
        f"`{found.command}`.\n"
    )


def import_cost(path: Path = RESULTS) -> str:
    """Say what the name costs every program that imports torch."""
    cost = _read(path).import_cost
    return (
        f"The name costs `import torch` {cost.the_name_ms:.1f} ms, of the {cost.without_ms:.0f} ms "
        f"that it takes without; no numpy and nothing of the core is loaded by it.\n"
    )
