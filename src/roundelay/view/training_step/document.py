"""A training step as a document: what the page draws, and nothing that it would have to know."""

from __future__ import annotations

from roundelay.planning import gigabytes
from roundelay.planning.held import Held
from roundelay.view.languages import Language
from roundelay.view.terminal_text import seconds_text
from roundelay.view.training_step.choices import TOKENS, StepChoices
from roundelay.view.training_step.frames import StepFrame, TrainingStep, training_step
from roundelay.view.training_step.lanes import PARTS, LaneSpan, Movement
from roundelay.view.training_step.words import StepTeller

__all__ = ["step_document"]

MEMORY = ("parameters", "gradients", "optimizer", "transient")


def step_document(choices: StepChoices, language: Language = "en") -> dict[str, object]:
    """Return one step with its moments, told in a language.

    Times are milliseconds. A cell has a digit for each shard, or one for all: 0 nothing, 1 the
    rank's own gradient, 2 what the ranks agree on, 3 the same after the step.
    """
    step = training_step(choices)
    teller = StepTeller(step, language)
    sizes = step.sizes
    peak = max(held.total for frame in step.frames for held in frame.held)
    return {
        "strategy": choices.strategy,
        "name": teller.name,
        "precision": choices.precision,
        "ranks": choices.ranks,
        "straggler": choices.straggler,
        "server": 0 if choices.served else None,
        "units": [teller.units([unit]) for unit in range(choices.layers)],
        "parameters_text": _count(choices.layers * sizes.unit),
        "tokens": TOKENS,
        "cluster": choices.cluster,
        "milliseconds": _ms(step.seconds),
        "seconds": seconds_text(step.seconds),
        "most_waited": seconds_text(max(step.waited)),
        "peak": peak,
        "peak_text": gigabytes(peak),
        "lanes": [_span(one) for one in step.spans if one.end > one.start],
        "frames": [_moment(step, teller, number) for number in range(len(step.frames))],
    }


def _moment(step: TrainingStep, teller: StepTeller, number: int) -> dict[str, object]:
    frame: StepFrame = step.frames[number]
    return {
        "at": _ms(frame.at),
        "title": teller.title(number),
        "words": teller.words(number),
        "cells": [[list(mine[part]) for part in PARTS] for mine in frame.cells],
        "memory": [_bytes(held) for held in frame.held],
        "total": [gigabytes(held.total) for held in frame.held],
        "sent": list(frame.sent),
        "sent_text": [gigabytes(one) for one in frame.sent],
        "moves": [_move(one) for one in frame.movements],
        "inbox": _inbox(step, frame),
        "versions": {str(rank): version for rank, version in frame.versions.items()},
    }


def _count(numel: int) -> str:
    """Write a number of parameters as people say it.

    >>> _count(805_519_360), _count(1_611_038_720)
    ('806M', '1.61B')
    """
    return f"{numel / 1e9:.3g}B" if numel >= 1e9 else f"{numel / 1e6:.3g}M"  # noqa: PLR2004 - 10⁹


def _inbox(step: TrainingStep, frame: StepFrame) -> list[int]:
    """Return the workers whose gradients the server has, of those that come together."""
    if step.choices.strategy != "ps":
        return []
    return [one.pairs[0][0] for one in step.movements
            if one.kind == "push" and one.end <= frame.at + 1e-11]  # fmt: skip


def _bytes(held: Held) -> list[int]:
    return [getattr(held, word) for word in MEMORY]


def _span(one: LaneSpan) -> dict[str, object]:
    return {"rank": one.rank, "lane": one.lane, "kind": one.kind, "units": list(one.units),
            "start": _ms(one.start), "end": _ms(one.end), "for": one.waits_for}  # fmt: skip


def _move(one: Movement) -> dict[str, object]:
    return {"kind": one.kind, "part": one.part, "units": list(one.units),
            "pairs": [list(pair) for pair in one.pairs], "bytes": one.nbytes,
            "text": gigabytes(one.nbytes), "algorithm": one.algorithm}  # fmt: skip


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)
