"""`rd.explain`: a schedule as an object that shows itself, in a terminal and in a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from roundelay.algorithms import algorithm_of, collective_or_algorithm, default_algorithm
from roundelay.arguments import path_of, whole
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.networks import Graph, networks
from roundelay.schedule import Network, Schedule, price
from roundelay.view.picture import Picture, picture

__all__ = ["Explanation", "explain"]

WIDTH = 100  # columns of the text
HEIGHT = 680  # pixels of the page in a notebook
MOST_RANKS = 64


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What `rd.explain` returns: a picture that notebooks show as a page to step through."""

    picture: Picture

    @property
    def schedule(self) -> Schedule:
        """The schedule that is shown."""
        return self.picture.schedule

    def __str__(self) -> str:
        """Draw every step as text."""
        from roundelay.view.terminal import Drawing  # noqa: PLC0415 - a notebook needs none

        drawing = Drawing(self.picture, width=WIDTH)
        # In a notebook rich would show what is printed here, beside what the notebook shows.
        console = Console(
            file=io.StringIO(), width=WIDTH, highlight=False, emoji=False, force_jupyter=False
        )
        console.print(drawing.title())
        for number in range(len(self.picture.frames)):
            console.print(drawing.frame(number))
            console.print()
        console.print(drawing.cost())
        console.print(drawing.legend())
        text: str = console.file.getvalue()  # type: ignore[attr-defined] # the StringIO above
        return "\n".join(line.rstrip() for line in text.splitlines())

    __repr__ = __str__

    def to_html(self) -> str:
        """Return a whole page that steps through the schedule, with nothing outside of it."""
        from roundelay.view.html import html  # noqa: PLC0415 - a terminal needs none

        return html([self.picture])

    def to_svg(self) -> str:
        """Return all steps as one drawing."""
        from roundelay.view.svg import svg  # noqa: PLC0415 - likewise

        return svg([self.picture])

    def save(self, path: str | Path) -> Path:
        """Write FILE.html, a page to step through, or FILE.svg, a drawing."""
        file = path_of("path of save", path)
        forms = {".html": self.to_html, ".svg": self.to_svg}
        if file.suffix not in forms:
            raise InvalidArgumentError(f"save writes .html or .svg, not {file.name}.")
        file.write_text(forms[file.suffix](), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own: it reaches nothing of the notebook."""
        return (
            f'<iframe title="{escape(self.picture.title, quote=True)}" sandbox="allow-scripts" '
            f'style="width:100%;height:{HEIGHT}px;border:0" '
            f'srcdoc="{escape(self.to_html(), quote=True)}"></iframe>'
        )


def explain(
    collective: str,
    algorithm: str | None = None,
    size: int = 4,
    *,
    root: int = 0,
    nbytes: int = 1 << 20,
    network: Network | None = None,
    rank_name: str = "GPU",
    **options: Any,  # the algorithm's own
) -> Explanation:
    """Return how an algorithm does a collective, step by step: a page in notebooks, else text.

    >>> ring = explain("all_reduce", "ring", 4)
    >>> ring.schedule.name, len(ring.schedule.steps)
    ('all_reduce_ring', 6)
    >>> print(str(ring).splitlines()[0])
    all_reduce_ring on 4 ranks
    """
    wanted, named = collective_or_algorithm(collective)
    name = algorithm or named
    found = default_algorithm(wanted) if name is None else algorithm_of(wanted, name)
    size = whole("size of explain", size, 1, MOST_RANKS)
    schedule = found.schedule(size, root, **options)
    on = networks.load("switch")(size) if network is None else network
    title = f"{schedule.name} on {rank_count(size)}"
    return Explanation(
        picture(
            schedule,
            price=price(schedule, nbytes, itemsize=1 if nbytes % 4 else 4, network=on),
            rank_name=rank_name,
            title=title + (f", root {schedule.root}" if wanted.rooted else ""),
            hosts=on.hosts() if isinstance(on, Graph) else {},
        )
    )
