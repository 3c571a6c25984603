"""The table of `roundelay top`: a line for every rank, in narrow windows a few short ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from roundelay.cli._tables import empty_table
from roundelay.live.snapshot import RankNow
from roundelay.live.watch import JobSeen
from roundelay.view.terminal_text import ASCII, Glyphs, number_of, safe, seconds_text

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
NARROW = 110  # columns; in fewer, a rank takes several lines


def drawn(seen: JobSeen, glyphs: Glyphs, width: int) -> RenderableType:
    """Draw a job: its ranks, and below them what it hangs on."""
    ranks = number_of(len(seen.now.ranks), "rank")
    rate = f"{sum(seen.rates) / 1e9:.2f} GB/s in all"
    head = glyphs.dot.join([safe(brief(seen.command), glyphs), ranks, rate])
    table = _narrow(seen, glyphs) if width < NARROW else _wide(seen, glyphs)
    parts: list[RenderableType] = [Text(head, style="bold"), table]
    for words, style in ((seen.now.trouble, "bold red"), (seen.now.hangs, "bold yellow")):
        if words:
            parts.append(Text(safe(words[0].upper() + words[1:], glyphs), style=style))
    return Group(*parts)


def _wide(seen: JobSeen, glyphs: Glyphs) -> Table:
    table = empty_table(glyphs)
    table.add_column("", no_wrap=True, min_width=1, overflow=_cut(glyphs))
    for name in ("rank", "step", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4, overflow=_cut(glyphs))
    table.add_column("does", no_wrap=True, min_width=25, overflow=_cut(glyphs))
    table.add_column("call", no_wrap=True, overflow=_cut(glyphs))
    table.add_column("line", no_wrap=True, overflow=_cut(glyphs))
    for one, mark, rank in _marked(seen, glyphs):
        step = "-" if one.step is None else str(one.step)
        call, site = safe(_call(one), glyphs), safe(_short(one.site), glyphs)
        rate = f"{seen.rates[one.rank] / 1e9:.2f}"
        table.add_row(mark, rank, step, rate, _does(one, glyphs), call, Text(site, style="dim"))
    return table


def _narrow(seen: JobSeen, glyphs: Glyphs) -> Table:
    table = empty_table(glyphs)
    table.add_column("", no_wrap=True, min_width=1, overflow=_cut(glyphs))
    table.add_column("rank", justify="right", no_wrap=True, min_width=4, overflow=_cut(glyphs))
    table.add_column("does", no_wrap=True, overflow=_cut(glyphs))
    for one, mark, rank in _marked(seen, glyphs):
        step = "" if one.step is None else f"{glyphs.dot}step {one.step}"
        does = _does(one, glyphs)
        does.append(f"{step}{glyphs.dot}{seen.rates[one.rank] / 1e9:.2f} GB/s", "default")
        lines = [safe(_call(one), glyphs), safe(_short(one.site), glyphs)]
        rest = [Text(line, style="dim", no_wrap=True, overflow=_cut(glyphs))
                for line in lines if line]  # fmt: skip
        table.add_row(mark, rank, Group(does, *rest))
    return table


def _cut(glyphs: Glyphs) -> OverflowMethod:
    """Say how what is too long ends; rich's own sign for it is not ASCII."""
    return "crop" if glyphs is ASCII else "ellipsis"


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
