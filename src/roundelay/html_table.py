"""A table as HTML that stands by itself, for notebooks; whatever is in it is shown as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table"]

#: No classes, no colours of our own: it looks like the notebook that it stands in.
CELL = "padding:2px 8px;font-variant-numeric:tabular-nums;white-space:nowrap"


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    marked: int | None = None,
) -> str:
    """Return a table with numbers to the right, a title above it, and notes below.

    >>> "&lt;held&gt;</th>" in html_table(["rank", "<held>"], [["0", "3 GB"]])
    True
    """
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    sides = ["right" if all(map(_number, column)) else "left" for column in columns]
    above = f'<caption style="text-align:left">{escape(title)}</caption>' if title else ""
    named = "".join(_cell("th", word, side) for word, side in zip(head, sides, strict=True))
    body = "".join(
        f"<tr{_marked(at == marked)}>"
        + "".join(_cell("td", word, side) for word, side in zip(row, sides, strict=True))
        + "</tr>"
        for at, row in enumerate(rows)
    )
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<div style="overflow-x:auto"><table>{above}<thead><tr>{named}</tr></thead>'
        f"<tbody>{body}</tbody></table>{below}</div>"
    )


def _cell(tag: str, word: str, side: str) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f'<{tag}{scope} style="{CELL};text-align:{side}">{escape(word)}</{tag}>'


def _marked(yes: bool) -> str:  # noqa: FBT001 - one question
    return ' style="font-weight:bold"' if yes else ""


def _number(word: str) -> bool:
    return word[:1].isdigit() or word[:1] in ("", "+", "-", "?")
