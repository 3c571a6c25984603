"""Bytes that a rank holds of parameters, gradients and optimizer state, by the words of the ledger.

`rd.ledger` measures a run in these words, and predicts them by the formulas here and in `rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundelay.planning.rows import PARTS_AFTER_STEP, passed_through, runs

__all__ = ["ByteWidths", "Held", "served", "whole_everywhere", "worker", "zero"]

FIRST_DTYPE = 4  # bytes of an element of the model as it is given: buckets are cut before casting


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one rank holds, by what they are for."""

    parameters: int = 0  # of the model, and its buffers; on a server, those that it updates
    gradients: int = 0
    optimizer: int = 0  # its state, and master weights
    transient: int = 0  # buffers for communication, units gathered at the moment
    host: int = 0  # of all these, what lies on the host while the model is on another device

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.transient


@dataclass(frozen=True, slots=True)
class ByteWidths:
    """Bytes for one parameter: itself, its gradient, its master weight, the optimizer's state."""

    parameter: int
    gradient: int
    master: int
    state: int

    @property
    def optimizer(self) -> int:
        """What the optimizer keeps: its state, and the master weight."""
        return self.master + self.state

    @property
    def updated(self) -> int:
        """What the optimizer updates: the master weight, or the parameter where there is none."""
        return self.master or self.parameter


def whole_everywhere(numel: int, width: ByteWidths) -> Held:
    """Return what every rank of data parallel holds: all of it.

    >>> whole_everywhere(7_500_000_000, ByteWidths(2, 2, 4, 8)).total / 1e9
    120.0
    """
    return Held(
        parameters=numel * width.parameter,
        gradients=numel * width.gradient,
        optimizer=numel * width.optimizer,
    )


def bucket_rows(tensors: Sequence[int], bucket: int) -> list[int]:
    """Return the elements of every row, last tensors first as their gradients come.

    >>> bucket_rows([100, 10, 10], bucket=80)
    [20, 100]
    """
    last_first = list(reversed(tensors))
    sizes = [numel * FIRST_DTYPE for numel in last_first]
    return [sum(last_first[at] for at in run)
            for run in runs([None] * len(sizes), sizes, most=bucket)]  # fmt: skip


def zero(
    rows: Sequence[int], width: ByteWidths, *, stage: int, size: int, several: bool = False
) -> Held:
    """Return what a rank holds if rows of so many elements are divided between `size` ranks.

    A row is padded until it divides. Stage 1 divides the optimizer's state, 2 the gradients, too,
    and 3 the parameters, too; `several` says that a step has several micro-batches.

    >>> whole = zero([1000, 3000], ByteWidths(2, 2, 4, 8), stage=3, size=4)
    >>> whole.parameters, whole.gradients, whole.optimizer
    (2000, 2000, 12000)
    """
    parts = [-(-numel // size) for numel in rows]
    padded, own = sum(parts) * size, sum(parts)
    transient = 0
    if size > 1:
        transient = passed_through(
            [part * size * width.gradient for part in parts],
            [part * width.gradient for part in parts],
            stage,
            several=several,
        )
        if stage < 3:  # noqa: PLR2004 - a stage: parts on their way after a step
            transient += PARTS_AFTER_STEP * max(parts, default=0) * width.parameter
    return Held(
        parameters=(own if stage == 3 else padded) * width.parameter,  # noqa: PLR2004 - likewise
        gradients=(padded if stage == 1 else own) * width.gradient,
        optimizer=own * width.optimizer,
        transient=transient,
    )


def worker(numel: int, width: ByteWidths, *, together: bool) -> Held:
    """Return what a worker holds whose parameter server is on another rank.

    If a server aggregates the gradients of all `together`, workers step, and what was received is
    the gradient. Otherwise the server steps, and a worker receives what that updates.
    """
    message = numel * width.gradient
    return Held(
        parameters=numel * width.parameter,
        gradients=message,
        optimizer=numel * width.optimizer if together else 0,
        transient=message + (0 if together else numel * width.updated),
    )


def served(numel: int, width: ByteWidths, *, workers: int, together: bool) -> Held:
    """Return what the rank holds that is a worker and the one parameter server.

    A server that aggregates has an inbox for each worker and one for the sum, and workers step;
    one that updates for each worker by itself has one inbox, the parameters and their state.

    >>> served(100, ByteWidths(2, 2, 4, 8), workers=3, together=False)
    Held(parameters=600, gradients=200, optimizer=800, transient=800, host=0)
    """
    own = worker(numel, width, together=together)
    inboxes = (workers + 1 if together else 1) * numel * width.gradient
    return Held(
        parameters=own.parameters + (0 if together else numel * width.updated),
        gradients=own.gradients,
        optimizer=own.optimizer if together else numel * width.state,
        transient=own.transient + inboxes,
    )
