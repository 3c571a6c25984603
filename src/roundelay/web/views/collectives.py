"""The view *Collectives*: any algorithm step by step, two side by side, their price, who wins."""

from __future__ import annotations

from roundelay.algorithms import algorithm_of, algorithms_of, default_algorithm
from roundelay.collectives import Collective
from roundelay.collectives import collectives as contracts
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.reductions import REDUCTIONS
from roundelay.schedule import Schedule, to_json
from roundelay.values import Numbers, Values, size_for, values_from
from roundelay.view import Picture, picture
from roundelay.view.html import picture_data, titles_of
from roundelay.view.languages import Language
from roundelay.view.picture import title_of
from roundelay.view.story import promise_of
from roundelay.web.costs import (
    MOST_RANKS,
    crossover_of,
    network_names,
    network_of,
    priced,
    prices_of,
)
from roundelay.web.query import Query
from roundelay.web.view import Document, View

__all__ = ["collectives"]

#: Cells times frames that a picture may have.
MOST_CELLS = 400_000
MOST_BYTES = 1 << 40
MOST_VALUES = 2000  # characters
NOT_TWO = "none"
#: Reductions of plain numbers; those of pairs need more than a text of numbers.
OPS = tuple(name for name in REDUCTIONS if not name.endswith("loc"))


def _choices(query: Query) -> Document:
    """Return what there is to choose from."""
    return {
        "collectives": [
            {
                "name": each.name,
                "promise": promise_of(each, query.language),
                "rooted": each.rooted,
                "adds": each.reduces and not each.idempotent,
                "carries": not each.idempotent,
                "algorithms": [algorithm.short_name for algorithm in algorithms_of(each)],
                "default": default_algorithm(each).short_name,
            }
            for each in contracts
        ],
        "networks": network_names(),
        "ops": OPS,
        "most_ranks": MOST_RANKS,
    }


def _pictures(query: Query) -> Document:
    """Return one algorithm as the page draws it, or two."""
    collective = contracts.load(query.choice("collective", contracts.names(), "all_reduce"))
    short = [each.short_name for each in algorithms_of(collective)]
    names = [query.choice("algorithm", short, default_algorithm(collective).short_name)]
    other = query.choice("compare", [NOT_TWO, *short])
    names += [] if other == NOT_TWO else [other]
    values = values_from(text) if (text := query.text("values", most=MOST_VALUES)) else None
    size = query.whole("ranks", 0, low=1, high=MOST_RANKS)
    size = size_for(collective, values, size or None) if values else size or 4
    root = query.whole("root", 0, low=0, high=size - 1)
    op = query.choice("op", OPS)
    nbytes = query.whole("bytes", 1 << 20, low=1, high=MOST_BYTES)
    network = query.choice("network", network_names())
    drawn = [
        _drawn(schedule, values, op, priced_at=(nbytes, network), language=query.language)
        for schedule in (_schedule(collective, name, size, root) for name in names)
    ]
    title, titles = titles_of([each.title for each in drawn], query.language)
    return {"title": title, "pictures": [*map(picture_data, drawn, titles)]}


def _schedule(collective: Collective, name: str, size: int, root: int) -> Schedule:
    if root and not collective.rooted:
        raise InvalidArgumentError(f"{collective.name} has no root: its ranks are all alike.")
    schedule = algorithm_of(collective, name).schedule(size, root)
    cells = {*schedule.held_before(), *((t.dst, t.chunk) for t in schedule.transfers)}
    frames = len(schedule.steps) + 1
    if len(cells) * frames > MOST_CELLS:
        raise InvalidArgumentError(
            f"{schedule.name} on {rank_count(size)} has {len(cells)} cells in {frames} frames: too "
            f"much to draw. Take fewer ranks."
        )
    return schedule


def _drawn(
    schedule: Schedule,
    values: Values | None,
    op: str,
    *,
    priced_at: tuple[int, str],
    language: Language,
) -> Picture:
    nbytes, network = priced_at
    run = _run(schedule, values, op)
    return picture(
        schedule,
        values=run.frames if run else None,
        price=priced(schedule, nbytes, network),
        title=title_of(schedule, language, op=op if run else ""),
        hosts=network_of(network, schedule.size).hosts(),
        language=language,
    )


def _run(schedule: Schedule, values: Values | None, op: str) -> Numbers | None:
    if values is None:
        return None
    from roundelay.values.run import run  # noqa: PLC0415 - numpy, for real numbers only

    return run(schedule, values, op=op if schedule.collective.reduces else "sum")


def _text(query: Query) -> Document:
    """Return an algorithm as JSON, to be changed and pasted; or with a transfer left out."""
    collective = contracts.load(query.choice("collective", contracts.names(), "all_reduce"))
    short = [each.short_name for each in algorithms_of(collective)]
    name = query.choice("algorithm", short, default_algorithm(collective).short_name)
    size = query.whole("ranks", 4, low=1, high=MOST_RANKS)
    root = query.whole("root", 0, low=0, high=size - 1)
    schedule = _schedule(collective, name, size, root)
    if query.choice("broken", ("no", "yes")) == "yes":
        schedule = _with_a_hole(schedule)
    return {"text": to_json(schedule)}


def _with_a_hole(schedule: Schedule) -> Schedule:
    """Leave out one transfer, in the middle, of a step that has others; else the last one."""
    full = [transfers for transfers in schedule.steps if len(transfers) > 1]
    left_out = full[len(full) // 2][0] if full else next(reversed(schedule.transfers), None)
    return Schedule(
        schedule.collective,
        schedule.size,
        [each for each in schedule.transfers if each != left_out],
        root=schedule.root,
        parts=schedule.parts,
        name=f"{schedule.name} with a hole",
    )


def _prices(query: Query) -> Document:
    """Return what every algorithm costs at one point."""
    collective = contracts.load(query.choice("collective", contracts.names(), "all_reduce"))
    size = query.whole("ranks", 4, low=1, high=MOST_RANKS)
    root = query.whole("root", 0, low=0, high=size - 1) if collective.rooted else 0
    nbytes = query.whole("bytes", 1 << 20, low=1, high=MOST_BYTES)
    return prices_of(collective, size, root, nbytes, query.choice("network", network_names()))


def _crossover(query: Query) -> Document:
    """Return who wins where."""
    collective = contracts.load(query.choice("collective", contracts.names(), "all_reduce"))
    return crossover_of(collective, query.choice("network", network_names()))


collectives = View(
    name="collectives",
    answers={
        "choices": _choices,
        "pictures": _pictures,
        "prices": _prices,
        "crossover": _crossover,
        "text": _text,
    },
    takes={"proof": "roundelay.web.prove_pasted"},
)
