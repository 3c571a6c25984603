"""`rd.ledger`: what training should hold and exchange on each rank, beside what it really does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from roundelay.arguments import shown
from roundelay.communicator import Traffic
from roundelay.errors import InvalidArgumentError
from roundelay.html_table import html_table
from roundelay.parallel.staging import staging_of
from roundelay.training._activations import kept_by
from roundelay.training._run import Run, run_of
from roundelay.training._volume import add_up, exchanged
from roundelay.training.strategy import Held

__all__ = ["Entry", "Ledger", "ledger"]

WORDS = ("parameters", "gradients", "optimizer", "transient", "host")


@dataclass(frozen=True, slots=True)
class Entry:
    """One rank's line: predicted and measured; bytes, and bytes per step."""

    rank: int
    predicted: Held
    measured: Held
    sent_predicted: float
    sent: float | None  # None where the engine does not count
    received_predicted: float
    received: float | None
    calls: dict[str, int]  # collectives of one step
    #: On a mesh, what was sent along axes beside that: by layers that are divided, for example.
    along: dict[str, float] = field(default_factory=dict)
    #: In a pipeline, of how many micro-batches the last step kept activations at a time.
    kept: int = 0
    #: What autograd keeps of a forward pass for backward; None where no pass was asked for.
    activations: int | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The lines of all ranks."""

    strategy: str
    steps: int
    entries: Sequence[Entry]

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return msgspec.json.format(msgspec.json.encode(asdict(self)), indent=1).decode()

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
                 for row in rows]  # fmt: skip
        return "\n".join([self._title(), *lines, self._calls()])

    def _repr_html_(self) -> str:
        """Show the same table in a notebook."""
        head, *rows = self._rows()
        return html_table(head, rows, title=self._title(), notes=[self._calls()])

    def _title(self) -> str:
        return f"{self.strategy}, {self.steps} steps: predicted / measured, in bytes"

    def _calls(self) -> str:
        calls = ", ".join(f"{count} {name}" for name, count in self.entries[0].calls.items())
        return f"collectives per step: {calls or 'none'}"

    def _rows(self) -> list[list[str]]:
        """Return the words above the columns, and a line for each rank."""
        host = any(entry.predicted.host or entry.measured.host for entry in self.entries)
        words = WORDS if host else WORDS[:-1]  # what is on the host is part of what stands before
        named = ["on the host" if word == "host" else word for word in words]
        axes = list(self.entries[0].along)
        staged = any(entry.kept for entry in self.entries)
        counted = ["activations"] * (self.entries[0].activations is not None)
        head = ["rank", *named, *counted, "sent/step", "received/step",
                *(f"along {name}" for name in axes), *["kept"] * staged]  # fmt: skip
        rows = [head]
        for entry in self.entries:
            held = [
                _pair(getattr(entry.predicted, word), getattr(entry.measured, word))
                for word in words
            ]
            held += [_bytes(entry.activations or 0) for _ in counted]
            rows.append([str(entry.rank), *held, _pair(entry.sent_predicted, entry.sent),
                         _pair(entry.received_predicted, entry.received),
                         *(_bytes(entry.along[name]) for name in axes),
                         *[str(entry.kept)] * staged])  # fmt: skip
        return rows


def _pair(predicted: float, measured: float | None) -> str:
    return f"{_bytes(predicted)} / {'?' if measured is None else _bytes(measured)}"


def _bytes(number: float) -> str:
    size = float(number)
    for unit in ("", "K", "M", "G"):
        if size < 1024 or unit == "G":  # noqa: PLR2004 - the binary thousand
            return f"{size:.0f}{unit}" if unit == "" else f"{size:.2f}{unit}"
        size /= 1024
    return ""


def ledger(model: torch.nn.Module, *, forward: Callable[[], Any] | None = None) -> Ledger:
    """Return what a step holds and exchanges on every rank, predicted and measured.

    Every rank calls it, best right before `zero_grad()`, when all that a step holds is there.
    On a mesh, parameters are those of this rank's part of the model, and what is exchanged is
    what the strategy does along the axes of data; what else each axis sent has columns of its own.
    Of a pipeline it tells for how many micro-batches at a time activations were kept.
    With `forward=lambda: loss_of(model, batch)` activations are counted, too: it is run once, and
    what autograd then keeps for backward is measured, each storage once.
    """
    if forward is not None and not callable(forward):
        raise InvalidArgumentError(
            f"ledger takes forward=, a function that runs a forward pass and returns its loss: "
            f"lambda: loss_of(model, batch); not {shown(forward)}."
        )
    run = run_of("ledger", model)
    run.state.meet()
    held, volume = run.state.predicted()
    if run.setup.scaler is not None and run.everyone is run.comm:  # the ranks agree on every step
        volume = add_up([volume, exchanged(run.comm, "all_reduce", 8, item=8)])
    found = run.state.held()
    since, before = run.counted_from
    now, steps = run.state.traffic(), run.steps - since
    counted = [math.nan, math.nan]
    if now and before and len(now) == len(before) and steps:
        here = run.comm.rank
        counted = [(getattr(now[here], word) - getattr(before[here], word)) / steps
                   for word in ("sent", "received")]  # fmt: skip
    along = run.sent_along()
    axes = _along(run, along, steps)
    activations = math.nan if forward is None else kept_by(forward, run.setup.model)
    mine = [activations, *(getattr(one, word) for one in (held, found) for word in WORDS),
            volume.sent, volume.received, *counted, _kept(model), *axes.values()]  # fmt: skip
    rows = run.everyone.all_gather(np.array(mine, np.float64))
    _leave_out(run, now, along)
    entries = []
    for rank, (activations, *row) in enumerate(rows.tolist()):
        count = len(WORDS)
        whole: list[Any] = [int(number) for number in row[: 2 * count]]
        out, into, sent, received, kept, *others = row[2 * count :]
        entries.append(Entry(rank, Held(*whole[:count]), Held(*whole[count:]), out, _known(sent),
                             into, _known(received), dict(volume.calls),
                             dict(zip(axes, others, strict=True)), int(kept),
                             None if math.isnan(activations) else int(activations)))  # fmt: skip
    return Ledger(_word(run), steps, entries)


def _kept(model: Any) -> int:  # Any: a model, or a pipeline of one
    return 0 if staging_of(model) is None else int(model.record.peak)


def _leave_out(run: Run, now: list[Traffic] | None, along: dict[str, int] | None) -> None:
    """Have what was sent since then in nobody's mean of steps."""
    since, before = run.counted_from
    after, further = run.state.traffic(), run.sent_along()
    if before and now and after:
        shifted = [Traffic(*(a + c - b for a, b, c in zip(*each, strict=True)))
                   for each in zip(before, now, after, strict=True)]  # fmt: skip
        run.counted_from = since, shifted
    if run.along_from is not None and along is not None and further is not None:
        run.along_from = {name: sent + further[name] - along[name]
                          for name, sent in run.along_from.items()}  # fmt: skip


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _along(run: Run, now: dict[str, int] | None, steps: int) -> dict[str, float]:
    """Return what this rank sent in a step along each axis of a mesh, beside the strategy."""
    if now is None or run.along_from is None or not steps:
        return {}
    return {name: (sent - run.along_from[name]) / steps for name, sent in now.items()}


def _word(run: Run) -> str:
    kind = run.strategy
    fitting = [name for name, options in kind.names.items() if kind == type(kind)(**options)]
    return fitting[0] if fitting else repr(kind)
