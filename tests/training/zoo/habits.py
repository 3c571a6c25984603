"""What a habit is: a program with a name, as tables show it; and what most programs do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zoo.place import ROWS, Place, Program, State

__all__ = ["HABITS", "Habit", "adam", "habit", "made", "rows_of", "sgd", "tokens_of", "trained"]

STEPS = 3


@dataclass(frozen=True, slots=True)
class Habit:
    """A program, and the line of the table that it belongs to."""

    family: str
    name: str
    program: Program
    engine: str


#: Every habit, by name.
HABITS: dict[str, Habit] = {}


def habit(family: str, name: str, *, engine: str = "threads") -> Callable[[Program], Program]:
    """Put a program into the zoo; what is not for several threads needs processes."""

    def keep(program: Program) -> Program:
        HABITS[name] = Habit(family, name, program, engine)
        return program

    return keep


_building = threading.Lock()


def made(build: Callable[[], Any]) -> Any:
    """The same weights every time and on every rank, and nobody's random numbers disturbed."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return build().double()


def rows_of(step: int, width: int = 4, count: int = ROWS) -> Any:
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


def tokens_of(step: int, length: int = 5, words: int = 11) -> Any:
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randint(0, words, (ROWS, length), generator=generator)


def adam(parameters: Any) -> Any:
    """With an epsilon that makes nothing of a gradient that is zero but for rounding."""
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-4)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(
    at: Place,
    model: Any,
    loss: Callable[[Any, int, Any, int], Any],
    *,
    rows: Callable[[int], Any] = rows_of,
    optimizer: Callable[[Any], Any] = adam,
    wrap: Callable[[Any], Any] = lambda model: model,
) -> State:
    """Train for a few steps on a loss of model, rank, rows and step; return the whole state."""
    model, own = at.prepare(model, optimizer(model.parameters()))
    called = wrap(model)
    for step in range(STEPS):
        at.loss(lambda rank, x: loss(called, rank, x, step), rows(step)).backward()  # noqa: B023
        own.step()
        own.zero_grad()
    return at.state(model)
