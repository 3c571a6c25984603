"""A picture as one HTML file that steps through the schedule; works from disk, with no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from roundelay.errors import InvalidArgumentError
from roundelay.schedule import Cell
from roundelay.view._graph import Shape
from roundelay.view._shape import chunk_hues, messages, slots
from roundelay.view.captions import about, brief, costs, failures, printable, step_cost
from roundelay.view.languages import Language
from roundelay.view.phrases import Phrases
from roundelay.view.picture import CellView, Frame, Picture

__all__ = ["digest", "embedded", "html", "joined", "picture_data", "read", "titles_of"]

#: Modules in the order in which they build on each other; joined, they are the page's one script.
SCRIPTS = (
    "kit.js",
    "words.js",
    "story.js",
    "layout.js",
    "shapes.js",
    "arrows.js",
    "stage.js",
    "table.js",
    "panel.js",
    "player.js",
    "deck.js",
    "page.js",
)
#: What modules take from one another, a line each; joined, they have it.
LINES_OF_MODULES = re.compile(r"^(?:import|export) \{.*\n", re.MULTILINE)

#: Sums longer than this have a short form, for tables that would not fit.
LONG = 5

#: The page shows one picture, or two side by side.
MOST_PICTURES = 2

Json = dict[str, Any]  # JSON of any shape
Values = dict[tuple[str | tuple[int, ...], ...], int]


def html(pictures: Sequence[Picture]) -> str:
    """Return a page that steps through one picture, or through two under one slider.

    Names and titles may come from strangers: they reach the page as data, are shown as text
    only, and the page's own policy allows no script or style but those written here.
    """
    if not 1 <= len(pictures) <= MOST_PICTURES:
        raise InvalidArgumentError(
            f"html draws 1 or {MOST_PICTURES} pictures, not {len(pictures)}. Draw more pages."
        )
    title, titles = titles_of([picture.title for picture in pictures], pictures[0].language)
    style = read("page.css")
    script = joined(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # One pass over the template, so that a title that looks like a placeholder stays a title.
    return Template(read("page.html")).substitute(
        policy=policy,
        language=pictures[0].language,
        title=escape(printable(title)),
        style=style,
        data=embedded({"pictures": [*map(picture_data, pictures, titles)]}),
        script=script,
    )


def read(name: str) -> str:
    """Return a file of the page."""
    return resources.files("roundelay.view").joinpath("page", name).read_text(encoding="utf-8")


def joined(names: Sequence[str]) -> str:
    """Return modules as one script, in which nothing is seen from outside."""
    modules = (LINES_OF_MODULES.sub("", read(name)) for name in names)
    return '"use strict";\n(() => {\n' + "\n".join(modules) + "\n})();\n"


def digest(text: str) -> str:
    """Return what a policy calls a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(data: Json) -> str:
    """Write JSON that can't end its script element: no `<`, and nothing outside ASCII."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def titles_of(titles: Sequence[str], language: Language = "en") -> tuple[str, Sequence[str]]:
    """Return the title of the page and of each picture; what two share is said once.

    >>> titles_of(["ring on 8 ranks", "tree on 8 ranks"])
    ('ring and tree on 8 ranks', ['ring', 'tree'])
    """
    say = Phrases(language)
    if len(titles) == 1:
        return titles[0], titles
    between = say("title", name="", ranks="")
    heads, _, tails = zip(*(title.rpartition(between) for title in titles), strict=True)
    if len(set(tails)) > 1 or not all(heads):
        return say("titles", one=titles[0], other=titles[1]), titles
    both = say("titles", one=heads[0], other=heads[1])
    return say("title", name=both, ranks=tails[0]), list(heads)


def picture_data(picture: Picture, title: str) -> Json:
    """Return what the page needs: frame 0 in full, then only what each step changed.

    Ring all-reduce writes the same sums again and again on its way around, so texts and
    contributors are listed once, as `values`, and cells point at them.
    """
    values: Values = {}
    frames = [_frame(picture, frame, values) for frame in picture.frames]
    return {
        "title": printable(title),
        "about": about(picture),
        "ranks": [printable(name) for name in picture.ranks],
        "chunks": [printable(name) for name in picture.chunks],
        "hues": chunk_hues(picture),
        "slots": slots(picture),
        "values": list(values),
        "frames": frames,
        "failures": list(failures(picture)),
        "costs": list(costs(picture)),
        "places": [printable(place) for place in picture.story.places],
        "words": [printable(words) for words in picture.story.words],
        "adds": picture.schedule.collective.reduces,
        "shape": _shape(picture.shape),
    }


def _shape(shape: Shape) -> Json:
    """Return how the ranks are to be placed; without any of it, around a ring."""
    return {
        "hosts": shape.hosts,
        "names": [printable(name) for name in shape.names],
        "trees": [[tree.root, tree.parents, tree.chunks] for tree in shape.trees],
        "line": shape.line,
    }


def _value(name: str, view: CellView) -> tuple[str | tuple[int, ...], ...]:
    """Return text and contributors, and the short form of a long sum: a0…15."""
    short = brief(name, view) if len(view.text) > LONG else view.text
    if short != view.text:
        return view.text, view.ranks, short
    return printable(view.text), view.ranks


def _frame(picture: Picture, frame: Frame, values: Values) -> Json:
    def entry(cell: Cell, view: CellView) -> list[int]:
        value = _value(picture.chunks[cell.chunk], view)
        return [cell.rank, cell.chunk, values.setdefault(value, len(values)), int(view.done)]

    shown = frame.cells if frame.step is None else sorted(frame.changed)
    found: Json = {"cells": [entry(Cell(*cell), frame.cells[cell]) for cell in shown]}
    if frame.step is not None:
        sent = messages(frame.transfers)
        found["messages"] = [
            [src, dst, [[transfer.chunk, transfer.op] for transfer in joined]]
            for src, dst, joined in sent
        ]
        found["cost"] = step_cost(picture, frame.step, len(sent))
    return found
