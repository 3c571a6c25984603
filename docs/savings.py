"""Draw what ZeRO saves over the number of ranks: the formulas, and the limits people quote."""

from __future__ import annotations

from roundelay.view.chart import Axis, chart

__all__ = ["savings"]

WHOLE = 16  # bytes per parameter of mixed-precision Adam: 2 + 2 + 12
RANKS = [2**power for power in range(11)]


def savings() -> str:
    """Return the picture: how many times less each stage holds than plain data parallel."""
    held = {
        "zero1, limit 4": [(n, WHOLE / (4 + 12 / n)) for n in RANKS],
        "zero2, limit 8": [(n, WHOLE / (2 + 14 / n)) for n in RANKS],
        "zero3, linear": [(n, float(n)) for n in RANKS],
    }
    return chart(
        held,
        title="What ZeRO saves: mixed-precision Adam, 16 bytes per parameter",
        across=Axis("ranks", base=2),
        up=Axis("times less than DDP", base=2, text=lambda value: f"{value:g}x"),
    )
