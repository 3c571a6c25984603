"""Who holds what: one bar for each way to train, cut into what its bytes are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "holdings"]

WIDTH, LEFT, RIGHT, ROW = 760, 170, 700, 30
TOP = 64
COLOURS = ("#0b6bcb", "#2b8a3e", "#d9480f", "#862e9c", "#5f6b7a")


@dataclass(frozen=True, slots=True)
class Bar:
    """One way to train: what it is called, and how much is held for what."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def holdings(bars: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return the SVG; equal lengths are equal amounts, and every part says its own.

    >>> bars = [Bar("ddp", {"parameters": 2, "state": 12}), Bar("zero1", {"parameters": 2})]
    >>> holdings(bars, title="Who holds what", unit="bytes").count("<rect")
    6
    """
    words = list(dict.fromkeys(word for bar in bars for word in bar.parts))
    colour = {word: COLOURS[at % len(COLOURS)] for at, word in enumerate(words)}
    scale = (RIGHT - LEFT) / max((bar.total for bar in bars), default=1.0)
    rows = []
    for number, bar in enumerate(bars):
        top, left = TOP + ROW * number, float(LEFT)
        rows.append(
            f'<text x="{LEFT - 10}" y="{top + 15}" text-anchor="end">{escape(bar.name)}</text>'
        )
        for word, amount in bar.parts.items():
            width = amount * scale
            rows.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" '
                f'fill="{colour[word]}"/>'
            )
            if width > 30:  # noqa: PLR2004 - room for a number
                rows.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle" '
                    f'fill="#fff" font-size="11">{amount:.3g}</text>'
                )
            left += width
        rows.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{bar.total:.3g}</text>')
    height = TOP + ROW * len(bars) + 36
    at = LEFT
    for word in words:
        rows.append(
            f'<rect x="{at}" y="{height - 28}" width="12" height="12" fill="{colour[word]}"/>'
        )
        rows.append(f'<text x="{at + 17}" y="{height - 18}">{escape(word)}</text>')
        at += 34 + 7 * len(word)
    body = "\n".join(rows)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="12" fill="#222">
<title>{escape(title)}</title><rect width="100%" height="100%" fill="#fff"/>
<text x="16" y="26" font-size="15" font-weight="600">{escape(title)}</text>
<text x="16" y="46">{escape(unit)}</text>
{body}
</svg>
"""
