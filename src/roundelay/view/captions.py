"""What page and SVG say beside the drawing: costs, failures, and names that any file can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roundelay.schedule import Link
from roundelay.view._shape import messages
from roundelay.view.failure_words import failure_words
from roundelay.view.phrases import Phrases
from roundelay.view.picture import CellView, Picture
from roundelay.view.terminal_text import nbytes_text, seconds_text, short_sum

__all__ = ["about", "brief", "costs", "failures", "printable", "step_cost"]

#: Characters that no XML document may hold, and halves of surrogate pairs that no file can.
UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    r"""Replace what can be written neither into a page nor into an XML file.

    >>> printable("ring\x00 \ud800") == "ring\ufffd \ufffd"
    True
    """
    return UNPRINTABLE.sub("\ufffd", text)


def about(picture: Picture) -> str:
    """Say what the title does not: in which phases it goes, and how the data is cut."""
    say = Phrases(picture.language)
    plan = picture.story.plan or say("steps", n=len(picture.frames) - 1)
    part = "blocks" if picture.schedule.collective.named else "chunks"
    return printable(f"{plan[:1].upper()}{plan[1:]} · {say(part, n=len(picture.chunks))}")


def brief(name: str, view: CellView) -> str:
    """Return the text of a cell of chunk `name`; of a sum of symbols, its short form.

    >>> brief("a", CellView((0, 1, 2), "a0+a1+a2", True)), brief("a", CellView((0, 1), "3.5", True))
    ('a0…2', '3.5')
    """
    symbols = [f"{name}{rank}" for rank in view.ranks]
    if view.text in ("+".join(symbols), " ".join(symbols)):
        return short_sum(name, view.ranks)
    return view.text


def costs(picture: Picture) -> Iterator[tuple[str, str]]:
    """Yield what the schedule costs, as pairs of a label and an amount."""
    price, say = picture.price, Phrases(picture.language)
    yield say("Steps"), str(len(picture.frames) - 1)
    yield say("Messages"), str(sum(len(messages(frame.transfers)) for frame in picture.frames))
    if price is None:
        return
    news = picture.schedule.collective.idempotent  # carries no bytes
    if not news:
        yield say("Buffer"), nbytes_text(price.nbytes)
        yield say("Sent"), nbytes_text(max(price.sent, default=0))
        if price.links:
            link, load = max(price.links.items(), key=lambda item: item[1])
            load_of = say("link load", link=_link(link, picture), load=_joined(nbytes_text(load)))
            yield say("Busiest"), load_of
    if price.seconds is not None:
        network = printable(price.network or "")
        time = _joined(seconds_text(price.seconds))
        yield say("Time"), say("on network", time=time, network=network)


def step_cost(picture: Picture, number: int, count: int) -> str:
    """Say what step `number` costs, given how many messages it has."""
    said = [Phrases(picture.language)("messages", n=count)]
    if picture.price is not None:
        step = picture.price.steps[number]
        if not picture.schedule.collective.idempotent:
            said.append(nbytes_text(step.nbytes))
        if step.seconds is not None:
            said.append(seconds_text(step.seconds))
    return " · ".join(said)


def failures(picture: Picture) -> Iterator[tuple[int, int, int, str]]:
    """Yield frame, rank, chunk and words of each failure; those of no step are the last frame's."""
    say = Phrases(picture.language)
    for frame, found in picture.failures_by_frame().items():
        for failure in found:
            kind, detail = failure_words(failure, picture.language)
            rank, chunk = picture.ranks[failure.rank], picture.chunks[failure.chunk]
            words = say("failure", rank=rank, chunk=chunk, kind=kind, detail=detail)
            yield frame, failure.rank, failure.chunk, printable(words)


def _link(link: Link, picture: Picture) -> str:
    ends = [end if isinstance(end, str) else picture.ranks[end] for end in (link.src, link.dst)]
    return printable(" → ".join(ends))


def _joined(amount: str) -> str:
    """Keep a number and its unit on one line."""
    return amount.replace(" ", "\u00a0")
