"""The child that proves a pasted schedule: `python -m roundelay.web.prove_pasted LANGUAGE`."""

from __future__ import annotations

from roundelay.errors import ScheduleError
from roundelay.schedule import Schedule, from_json, price, prove
from roundelay.view import picture
from roundelay.view.html import picture_data
from roundelay.view.languages import Language
from roundelay.view.picture import title_of
from roundelay.web.pasted import answer_pasted
from roundelay.web.view import Document

__all__ = ["prove_pasted"]

MOST_RANKS = 64
MOST_CHUNKS = 4096
MOST_STEPS = 512
MOST_TRANSFERS = 20_000
MOST_DEPTH = 8  # of brackets: a schedule has three
#: Cells, and transfers into them, times frames.
MOST_CELLS = 4_000_000


def prove_pasted(text: bytes, language: Language) -> Document:
    """Prove a schedule, and return its picture; what breaks it is in the picture."""
    if _depth(text) > MOST_DEPTH:
        raise ScheduleError("schedule", "is nested too deeply")
    schedule = from_json(text)
    _check(schedule)
    drawn = picture(
        schedule,
        price=price(schedule, 1 << 20),
        title=title_of(schedule, language),
        language=language,
    )
    order = "" if drawn.failures else prove(schedule).order
    adds = schedule.collective.reduces and not schedule.collective.idempotent
    return {
        "proved": not drawn.failures,
        "name": schedule.name,
        "collective": schedule.collective.name,
        "order": order if adds else "",
        "first": min(drawn.failures_by_frame(), default=0),
        "title": drawn.title,
        "pictures": [picture_data(drawn, drawn.title)],
    }


def _depth(text: bytes) -> int:
    """Return how deep brackets go, at the most; those in names are counted too."""
    depth = most = 0
    for byte in text:
        if byte in b"[{":
            depth += 1
            most = max(most, depth)
        elif byte in b"]}":
            depth -= 1
    return most


def _check(schedule: Schedule) -> None:
    """Refuse what is too large to be looked at, by counting."""
    frames = len(schedule.steps) + 1
    held = sum(1 for _ in schedule.held_before()) + len(schedule.transfers)
    for what, has, most in (
        ("size", schedule.size, MOST_RANKS),
        ("parts", schedule.chunks, MOST_CHUNKS),
        ("steps", len(schedule.steps), MOST_STEPS),
        ("transfers", len(schedule.transfers), MOST_TRANSFERS),
        ("cells times steps", held * frames, MOST_CELLS),
    ):
        if has > most:
            raise ScheduleError(
                f"schedule: {what}",
                f"has {has:,}; the page takes {most:,}. `roundelay explain --schedule` takes more",
            )


if __name__ == "__main__":
    answer_pasted(prove_pasted)
