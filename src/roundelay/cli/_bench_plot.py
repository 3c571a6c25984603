"""A drawing of a benchmark: time over bytes on two logarithmic axes, one line a contender."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.bench import CaseResult
from roundelay.view.chart import Axis, chart
from roundelay.view.terminal_text import nbytes_text, seconds_text

__all__ = ["plot"]


def plot(rows: Sequence[CaseResult], title: str) -> str:
    """Return the SVG; rows without bytes, as a barrier's, are left out."""
    rows = [row for row in rows if row.nbytes]
    names = dict.fromkeys(name for row in rows for name in row.timings)
    curves: dict[str, list[tuple[float, float]]] = {
        name: [(row.nbytes, row.timings[name].seconds) for row in rows if name in row.timings]
        for name in names
    }
    curves["memory floor"] = [(row.nbytes, row.floor) for row in rows if row.floor]
    return chart(
        curves,
        title=title,
        across=Axis("bytes of the largest buffer of a rank", base=2, every=3, text=nbytes_text),
        up=Axis("time of one call", base=10, text=seconds_text),
    )
