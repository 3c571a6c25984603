"""The table of frameworks that run on Roundelay, and by which line."""

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
    """CPU time of `import torch`, and of our name in it, in milliseconds."""

    torch_ms: float
    name_ms: float


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
        f"Torch asks for the name while it is imported, wherever Roundelay is installed: "
        f"{cost.name_ms:.1f} ms of CPU time, of the {cost.torch_ms:.0f} ms of `import torch`. It "
        f"loads neither numpy nor the core.\n"
    )
