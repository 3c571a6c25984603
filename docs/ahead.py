"""Who is ahead where: every collective beside the best of the MPIs, cell by cell, of every machine.

A cell is the time of the best peer divided by ours, as benchmarks/collectives.py has measured it.
Each peer is compared with what ours took in the same run.
"""

from __future__ import annotations

import math
from pathlib import Path

from speed import OURS, RESULTS, Measured, Row, missing, read

from roundelay.view.terminal_text import nbytes_text

__all__ = ["ahead"]

NAME = "collectives"
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
#: The rows of a table: a collective on one kind of our arrays.
Line = tuple[str, str]
#: Ratio to the best peer, and who that is.
Cell = tuple[float, str]


def ahead(results: Path = RESULTS) -> str:
    """Return a table for each machine and number of ranks, and what is behind in so many words."""
    made = []
    for path in sorted(results.glob(f"{NAME}*.json")):
        measured = read(path)
        if measured is not None:
            made.append(_machine(measured))
    return "\n".join(made) or missing(NAME)


def _machine(measured: Measured) -> str:
    ranks: dict[int, dict[Line, dict[int, Cell]]] = {}
    for title, rows in measured.float32_sum.items():
        lines = ranks.setdefault(int(title.split()[0]), {})
        for row in rows:
            _add(lines, row)
    parts = []
    for size, lines in ranks.items():
        ours = [cell for (_, kind), cells in lines.items() if kind == OURS[0]
                for cell in cells.values()]  # fmt: skip
        if ours:
            parts.append(f"{size} ranks: {_summary(ours)}\n\n{_table(lines)}")
    return "\n".join([*parts, measured.where()])


def _add(lines: dict[Line, dict[int, Cell]], row: Row) -> None:
    """Put a row of results in its place; what is already there stays if that peer was better."""
    # Bytes are whole elements for each rank: some less than asked for, or a few more; or none.
    column = max((size for size in SIZES if row.bytes >= size // 2), default=SIZES[0])
    peers = {took: name for name, took in row.microseconds.items() if name not in OURS}
    for kind in OURS:
        if kind in row.microseconds and peers:
            cell = (min(peers) / row.microseconds[kind], peers[min(peers)])
            cells = lines.setdefault((row.collective, kind), {})
            cells[column] = min(cell, cells.get(column, cell))


def _summary(cells: list[Cell]) -> str:
    behind = sum(ratio < 1 for ratio, _ in cells)
    mean = math.exp(sum(math.log(ratio) for ratio, _ in cells) / len(cells))
    return (
        f"on ordinary arrays ahead in {len(cells) - behind} of {len(cells)} cells, behind in "
        f"{behind}; geometric mean {mean:.2f}."
    )


def _table(lines: dict[Line, dict[int, Cell]]) -> str:
    columns = [size for size in SIZES if any(size in cells for cells in lines.values())]
    made = [f"| best peer / ours | {' | '.join(map(nbytes_text, columns))} |"]
    made.append(f"|---|{'---:|' * len(columns)}")
    for (collective, kind), cells in lines.items():
        name = collective if kind == OURS[0] else f"{collective}, {kind}"
        said = [_cell(cells.get(size)) for size in columns]
        made.append(f"| {name} | {' | '.join(said)} |")
    return "\n".join([*made, ""])


def _cell(cell: Cell | None) -> str:
    """Say a ratio; where a peer is ahead, in bold and with its name."""
    if cell is None:
        return ""
    ratio, peer = cell
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}** {peer}"
