"""Who sends what to whom in a step, as lines of text: as few as the step's pattern allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from roundelay.schedule import Transfer
from roundelay.view.terminal_text import Glyphs, runs_of

__all__ = ["moves"]

#: What fits beside the names of two ranks.
MOST_CHUNKS = 6

Key = tuple[int, int, str]
KEYS: tuple[Callable[[Transfer], Key], ...] = (
    lambda transfer: (transfer.src, transfer.dst, transfer.op),  # what goes from one to another
    lambda transfer: (transfer.src, transfer.chunk, transfer.op),  # what one sends to several
    lambda transfer: (transfer.dst, transfer.chunk, transfer.op),  # what one takes from several
)


def moves(
    transfers: Sequence[Transfer],
    ranks: Sequence[str],
    chunks: Sequence[str],
    *,
    few: int,
    glyphs: Glyphs,
) -> list[Text]:
    """Tell a step pair by pair if that takes `few` lines, else by the shortest pattern."""
    patterns = [_grouped(transfers, key) for key in KEYS]
    best = min(patterns, key=lambda groups: max(len(groups), few))
    return [_line(group, ranks, chunks, glyphs) for group in best]


def _grouped(transfers: Sequence[Transfer], key: Callable[[Transfer], Key]) -> list[list[Transfer]]:
    groups: dict[Key, list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault(key(transfer), []).append(transfer)
    return list(groups.values())


def _line(
    group: Sequence[Transfer], ranks: Sequence[str], chunks: Sequence[str], glyphs: Glyphs
) -> Text:
    reduces = group[0].op == "reduce"
    names = [chunks[chunk] for chunk in sorted({transfer.chunk for transfer in group})]
    if len(names) > MOST_CHUNKS:
        names = [*names[: MOST_CHUNKS - 2], glyphs.more, names[-1]]
    line = Text(runs_of(ranks, {transfer.src for transfer in group}, glyphs))
    line.append(f" {glyphs.reduce if reduces else glyphs.copy} ", "yellow" if reduces else "cyan")
    line.append(runs_of(ranks, {transfer.dst for transfer in group}, glyphs))
    line.append("  " + " ".join(names), style="bold")
    return line
