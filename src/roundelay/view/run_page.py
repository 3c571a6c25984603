"""The timeline of a recorded run as one HTML file: a step at a time, and a table of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from roundelay.records import RunRecord
from roundelay.view.captions import printable
from roundelay.view.html import digest, read
from roundelay.view.languages import Language
from roundelay.view.run_lanes import RunWindow, windows
from roundelay.view.run_summary import RankTimes, summary
from roundelay.view.run_svg import PATTERNS, run_style, run_svg
from roundelay.view.run_words import COLUMNS, run_say
from roundelay.view.terminal_text import nbytes_text, seconds_text

__all__ = ["run_about", "run_page", "run_rows", "run_title"]


def run_page(run: RunRecord, shown: Sequence[RunWindow] | None = None) -> str:
    """Return the page. Names and lines come from strangers: they are text, and nothing else."""
    shown = windows(run) if shown is None else shown
    style = f"{read('run.css')}{run_style()}"
    script = f'"use strict";\n(() => {{\n{read("run.js")}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(read("run.html")).substitute(
        policy=policy,
        title=escape(run_title(run)),
        about=escape(run_about(run)),
        style=style,
        links="".join(
            f'<a href="#{escape(one.key)}">{escape(printable(one.name))}</a>' for one in shown
        ),
        patterns=PATTERNS,
        sections="\n".join(_section(run, one) for one in shown),
        script=script,
    )


def run_title(run: RunRecord, language: Language = "en") -> str:
    """Name a run: its program, and how many ranks."""
    program = run.ranks[0].program.rpartition("/")[2] if run.ranks else ""
    return printable(f"{program}: {run_say('ranks', language, count=run.size)}")


def run_about(run: RunRecord, language: Language = "en") -> str:
    """Say in a sentence how long a record is, and what it lacks."""

    def say(key: str, **fill: object) -> str:
        return run_say(key, language, **fill)

    hosts = {record.host for record in run.ranks}
    told = [say("recorded", time=seconds_text(run.length / 1e9), count=len(hosts))]
    missing = run.size - len(run.ranks)
    if missing:
        told.append(say("missing", count=missing))
    dropped = max((record.dropped for record in run.ranks), default=0)
    if dropped:
        told.append(say("dropped", count=dropped))
    if run.several_clocks:
        told.append(say("clocks"))
    unfinished = [(one.rank, one.unfinished) for one in summary(run).ranks if one.unfinished]
    told += [say("unfinished", rank=rank, what=what) for rank, what in unfinished[:4]]
    glue, end = ("; ", ".") if language == "en" else ("\uff1b", "\u3002")
    return printable(glue.join(told) + end)


def _section(run: RunRecord, window: RunWindow) -> str:
    head, *rows = run_rows(run, window)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{each}</tr>" for each in cells)
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<section id="{escape(window.key)}" tabindex="-1"><div class="scroll" tabindex="0">'
        f'{run_svg(run, window)}</div><div class="scroll" tabindex="0"><table><thead><tr>{top}'
        f"</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def run_rows(run: RunRecord, window: RunWindow, language: Language = "en") -> list[list[str]]:
    """Return the table of the ranks in a window: its head, then a row for each."""
    head = [run_say(f"column {name}", language) for name in COLUMNS]
    ranks = summary(run, window).ranks
    return [head, *(_row(one, language) for one in ranks)]


def _row(one: RankTimes, language: Language) -> list[str]:
    def took(ns: int) -> str:
        return seconds_text(ns / 1e9) if ns else "-"

    whom = max(one.waited_for, key=lambda rank: one.waited_for[rank], default=None)
    return [
        str(one.rank),
        *(took(one.phases.get(kind, 0)) for kind in ("forward", "backward", "exchange", "step")),
        took(one.in_calls),
        took(one.waited),
        "-" if whom is None else run_say("rank", language, rank=whom),
        took(one.background),
        "-" if one.overlap is None else f"{100 * one.overlap:.0f} %",
        str(one.calls),
        nbytes_text(one.nbytes),
    ]
