"""The timeline of a recorded run as one HTML file: a step at a time, and a table of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from roundelay.records import RunRecord
from roundelay.view.captions import printable
from roundelay.view.html import digest, read
from roundelay.view.run_lanes import RunWindow, windows
from roundelay.view.run_summary import RankTimes, summary
from roundelay.view.run_svg import PATTERNS, run_style, run_svg
from roundelay.view.terminal_text import nbytes_text, number_of, seconds_text

__all__ = ["run_page"]

COLUMNS = ("rank", "forward", "backward", "exchange", "step", "in calls", "waited", "most for",
           "in the background", "of that hidden", "calls", "buffers")  # fmt: skip


def run_page(run: RunRecord, shown: Sequence[RunWindow] | None = None) -> str:
    """Return the page. Names and lines come from strangers: they are text, and nothing else."""
    shown = windows(run) if shown is None else shown
    style = f"{read('run.css')}{run_style()}"
    script = f'"use strict";\n(() => {{\n{read("run.js")}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    program = run.ranks[0].program.rpartition("/")[2] if run.ranks else ""
    return Template(read("run.html")).substitute(
        policy=policy,
        title=escape(printable(f"{program}: {number_of(run.size, 'rank')}")),
        about=escape(printable(_about(run))),
        style=style,
        links="".join(
            f'<a href="#{escape(one.key)}">{escape(printable(one.name))}</a>' for one in shown
        ),
        patterns=PATTERNS,
        sections="\n".join(_section(run, one) for one in shown),
        script=script,
    )


def _about(run: RunRecord) -> str:
    hosts = {record.host for record in run.ranks}
    told = [f"{seconds_text(run.length / 1e9)} recorded on {number_of(len(hosts), 'host')}"]
    missing = run.size - len(run.ranks)
    if missing:
        told.append(f"{number_of(missing, 'rank')} left no record here")
    dropped = max((record.dropped for record in run.ranks), default=0)
    if dropped:
        told.append(f"up to {dropped} earlier events of a rank were overwritten")
    if run.several_clocks:
        told.append("clocks of hosts are put side by side at their first barrier")
    unfinished = [(one.rank, one.unfinished) for one in summary(run).ranks if one.unfinished]
    told += [f"rank {rank} was in {what} when its record ended" for rank, what in unfinished[:4]]
    return "; ".join(told) + "."


def _section(run: RunRecord, window: RunWindow) -> str:
    rows = "".join(map(_row, summary(run, window.start, window.end).ranks))
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return (
        f'<section id="{escape(window.key)}" tabindex="-1"><div class="scroll" tabindex="0">'
        f'{run_svg(run, window)}</div><div class="scroll" tabindex="0"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(one: RankTimes) -> str:
    def took(ns: int) -> str:
        return seconds_text(ns / 1e9) if ns else "-"

    whom = max(one.waited_for, key=lambda rank: one.waited_for[rank], default=None)
    cells = [
        str(one.rank),
        *(took(one.phases.get(kind, 0)) for kind in ("forward", "backward", "exchange", "step")),
        took(one.in_calls),
        took(one.waited),
        "-" if whom is None else f"rank {whom}",
        took(one.background),
        "-" if one.overlap is None else f"{100 * one.overlap:.0f} %",
        str(one.calls),
        nbytes_text(one.nbytes),
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
