"""The view Timelines: recorded runs, step by step, and the job that runs now."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from roundelay.algorithms import algorithms
from roundelay.errors import NoEngineError, OtherVersionError, RoundelayError
from roundelay.records import RunRecord
from roundelay.view.captions import printable
from roundelay.view.run_lanes import windows
from roundelay.view.run_page import run_about, run_rows, run_title
from roundelay.view.run_svg import run_svg
from roundelay.web.query import Query
from roundelay.web.svg_tree import svg_tree
from roundelay.web.view import Document, View

__all__ = ["timelines"]

LOOK_S, BETWEEN_S = 0.25, 0.02  # for which jobs are looked at; between two looks
MOST_JOBS = 32
ID = 24  # characters, at most


def _chosen(query: Query) -> RunRecord | None:
    """Return the run that is asked for, by an id of the list, or the newest; None without any."""
    wanted = query.text("run", most=ID)
    if query.runs is None or not (wanted or query.runs.runs()):
        return None
    return query.runs.run(wanted or query.runs.runs()[0].id)


def _runs(query: Query) -> Document:
    """List the recorded runs."""
    if query.runs is None:
        return {"given": False, "runs": []}
    found = query.runs.runs()
    return {
        "given": True,
        "runs": [
            {"id": one.id, "name": printable(one.name), "files": one.files,
             "changed": _date(one.changed)} for one in found
        ],
    }  # fmt: skip


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _run(query: Query) -> Document:
    """Say what a run is, and which steps it has."""
    run, language = _chosen(query), query.language
    if run is None:
        return {"title": "", "about": "", "steps": []}
    shown = windows(run, every=True, language=language)
    return {
        "title": run_title(run, language),
        "about": run_about(run, language),
        "steps": [{"key": one.key, "name": printable(one.name)} for one in shown],
    }


def _step(query: Query) -> Document:
    """Draw one step of a run, by default the last, with the table of its ranks."""
    run, language = _chosen(query), query.language
    if run is None:
        query.text("step")
        return {"picture": None, "head": [], "rows": []}
    shown = {one.key: one for one in windows(run, every=True, language=language)}
    window = shown[query.choice("step", shown, [*shown][-1])]
    head, *rows = run_rows(run, window, language)
    return {
        "picture": svg_tree(run_svg(run, window, language=language)),
        "head": head,
        "rows": [[printable(cell) for cell in row] for row in rows],
    }


def _live(query: Query) -> Document:
    """Look at the jobs of this user that run on this host."""
    language = query.language
    try:
        from roundelay.live.jobs import find_jobs  # noqa: PLC0415 - the native core
        from roundelay.live.watch import JobWatch  # noqa: PLC0415
    except (NoEngineError, ImportError):
        return {"jobs": []}
    names = tuple(algorithm.short_name for algorithm in algorithms)
    watches, refused = [], list[Document]()
    for job in find_jobs()[:MOST_JOBS]:
        try:
            watches.append(JobWatch(job, names, language))
        except OtherVersionError as error:
            refused.append({"job": job.number, "command": job.command, "refused": str(error)})
        except RoundelayError:
            continue  # over this moment
    until = time.monotonic() + LOOK_S
    while watches and time.monotonic() < until:  # all of them in the same while
        time.sleep(BETWEEN_S)
        for watch in watches:
            watch.glance()
    seen = [{"job": watch.job.number, **watch.seen().as_json()} for watch in watches]
    return {"jobs": [*seen, *refused]}


timelines = View(
    name="timelines", answers={"runs": _runs, "run": _run, "step": _step, "live": _live}
)
