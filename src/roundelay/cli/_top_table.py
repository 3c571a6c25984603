"""The table of `roundelay top`: a line for every rank, in narrow windows a few short ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roundelay.cli._tables import empty_table
from roundelay.live.snapshot import RankNow
from roundelay.live.watch import JobSeen
from roundelay.view.terminal_text import Glyphs, number_of, safe, seconds_text

STYLES = {
    "waits": "yellow",
    "stopped": "bold red",
    "dead": "bold red",
    "computes": "",
    "calls": "green",
    "left": "dim",
    "ended": "dim",
    "absent": "dim",
}
COLUMNS = ("", "rank", "step", "GB/s", "does", "call", "line")
CALL = COLUMNS.index("call")
LEAST = 28  # characters of a call; where there is room for fewer, a rank takes several lines


def drawn(seen: JobSeen, glyphs: Glyphs, width: int) -> RenderableType:
    """Draw a job: its ranks, and below them what it hangs on."""
    ranks = number_of(len(seen.now.ranks), "rank")
    rate = f"{sum(seen.rates) / 1e9:.2f} GB/s in all"
    head = glyphs.dot.join([safe(brief(seen.command), glyphs), ranks, rate])
    table = _wide(seen, glyphs, width) or _narrow(seen, glyphs, width)
    parts: list[RenderableType] = [Text(head, style="bold"), table]
    for words, style in ((seen.now.trouble, "bold red"), (seen.now.hangs, "bold yellow")):
        if words:
            parts.append(Text(safe(words[0].upper() + words[1:], glyphs), style=style))
    return Group(*parts)


def _wide(seen: JobSeen, glyphs: Glyphs, width: int) -> Table | None:
    """Return the table, with calls cut so that it fits; None where too little would stay."""
    rows: list[list[str | Text]] = []
    for one, mark, rank in _marked(seen, glyphs):
        step = "-" if one.step is None else str(one.step)
        rate = f"{seen.rates[one.rank] / 1e9:.2f}"
        call, site = safe(_call(one), glyphs), safe(_short(one.site), glyphs)
        rows.append([mark, rank, step, rate, _does(one, glyphs), call, site])
    wide = [max([len(name), *(len(row[at]) for row in rows)]) for at, name in enumerate(COLUMNS)]
    room = width - (sum(wide) - wide[CALL]) - 3 * len(COLUMNS) - 1
    if room < min(wide[CALL], LEAST):
        return None
    table = empty_table(glyphs)
    for name in COLUMNS:
        right = name in ("rank", "step", "GB/s")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        row[CALL] = _cut(str(row[CALL]), room, glyphs)
        table.add_row(*row[:-1], Text(str(row[-1]), style="dim"))
    return table


def _narrow(seen: JobSeen, glyphs: Glyphs, width: int) -> Table:
    room = max(1, width - len("rank") - 11)  # of the last of three columns
    table = empty_table(glyphs)
    table.add_column("", no_wrap=True, min_width=1)
    table.add_column("rank", justify="right", no_wrap=True, min_width=4)
    table.add_column("does", no_wrap=True)
    for one, mark, rank in _marked(seen, glyphs):
        step = [] if one.step is None else [f"step {one.step}"]
        does, rate = _does(one, glyphs), f"{seen.rates[one.rank] / 1e9:.2f} GB/s"
        lines = [glyphs.dot.join([*step, rate]), _call(one), _short(one.site)]
        rest = [Text(_cut(safe(line, glyphs), room, glyphs), style="dim") for line in lines if line]
        table.add_row(mark, rank, Group(does, *rest))
    return table


def _cut(text: str, room: int, glyphs: Glyphs) -> str:
    """Return as much of a text as there is room for."""
    if len(text) <= room:
        return text
    return f"{text[: max(0, room - len(glyphs.more))]}{glyphs.more}"[:room]


def _marked(seen: JobSeen, glyphs: Glyphs) -> Iterator[tuple[RankNow, Text, Text]]:
    """Yield every rank, with a mark for one that others wait for, and its number."""
    for one in seen.now.ranks:
        marked = one.rank == seen.straggler or one.state in ("stopped", "dead")
        style = "bold red" if marked else ""
        yield one, Text(glyphs.changed if marked else "", style), Text(str(one.rank), style)


def _does(one: RankNow, glyphs: Glyphs) -> Text:
    if one.waits_for is None or one.state == "stopped":
        return Text(one.state, STYLES[one.state])
    whom = "any rank" if one.waits_for < 0 else f"rank {one.waits_for}"
    return Text(f"waits for {whom}, {seconds_text(one.waited, glyphs)}", STYLES[one.state])


def _call(one: RankNow) -> str:
    first, _, rest = one.call.partition(" ")
    number = f" #{one.number}" if one.number else ""
    last = "last: " if one.state in ("computes", "stopped", "dead") and one.call else ""
    return f"{last}{first}{number} {rest}{one.group}".strip()


def brief(command: str, *, most: int = 60) -> str:
    """Leave out the interpreter, and the folders of the script.

    >>> brief("/usr/bin/python3 /home/me/train.py --lr 1")
    'train.py --lr 1'
    """
    words = command.split(" ")
    while len(words) > 1 and Path(words[0]).name.startswith("python"):
        words = words[1:]
    return " ".join([Path(words[0]).name, *words[1:]])[:most]


def _short(site: str) -> str:
    """Leave out the folders of a line, but for the last one.

    >>> _short("/home/me/project/train.py:12")
    'project/train.py:12'
    """
    return "/".join(site.split("/")[-2:])
