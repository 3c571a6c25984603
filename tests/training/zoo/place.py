"""Where a program runs: on one device, which stands for all ranks, or on one of them.

The same function is called with either; what it returns is compared. One device goes through the
shares of all ranks one after the other, so that programs in which ranks differ have a right answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import roundelay as rd
from roundelay.errors import CollectiveTimeout, RankFailed, RoundelayError
from roundelay.processes.reports import as_raised

__all__ = ["SIZES", "WAYS", "Place", "Program", "State", "Verdict", "alone", "judge", "largest"]

SIZES = (1, 2, 3)
ROWS = 12  # of a batch: divides by 1, 2 and 3, and once more by 2
TOLERANCE = 1e-12  # of the largest element
TIMEOUT_S = 120.0

#: Every strategy, by the name that tables have for it.
WAYS: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "ps": "ps",
    "ps server": rd.ParameterServer(update="server", servers=1),
    "ps servers": rd.ParameterServer(update="server", servers=2),
    "ps-async": "ps-async",
    "ps-ssp": "ps-ssp",
}

#: What a program returns, to be compared: whole tensors by name.
State = dict[str, torch.Tensor]
Program = Callable[["Place"], State]


class Place:
    """What a program sees of where it runs."""

    refusals: tuple[type[Exception], ...] = (RoundelayError,)

    def __init__(self, size: int, comm: Any = None, strategy: Any = None) -> None:
        self.size, self.comm, self.strategy = size, comm, strategy
        self.ranks = range(size) if comm is None else range(comm.rank, comm.rank + 1)

    @property
    def alone(self) -> bool:
        """Whether this is the one device."""
        return self.comm is None

    def prepare(self, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
        if self.alone:
            return model, optimizer
        return rd.prepare(model, optimizer, strategy=self.strategy, comm=self.comm, **options)

    def unprepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        if not self.alone:
            return rd.unprepare(model)
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.zero_grad()  # as there
        return model, optimizer

    # ---- data and losses

    def shares(self, rows: Any) -> Iterator[tuple[int, Any]]:
        """Yield the ranks that this place stands for, each with its part of the rows."""
        for rank in self.ranks:
            yield rank, rows.tensor_split(self.size)[rank]

    def loss(self, of: Callable[[int, Any], Any], rows: Any) -> Any:
        """The mean over this place's ranks of a function of rank and rows."""
        losses = [of(rank, share) for rank, share in self.shares(rows)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def backward(self, of: Callable[[int, Any], Any], rows: Any, total: int | None = None) -> None:
        """Weigh the losses by how many rows a rank has, which may be none, of so many in a step."""
        if not self.alone:
            rank, share = next(self.shares(rows))
            rd.backward(of(rank, share if len(share) else rows[:1]) * len(share), weight=len(share))
            return
        losses = [of(rank, one) * len(one) for rank, one in self.shares(rows) if len(one)]
        loss: Any = torch.stack(losses).sum() / (total or len(rows))
        loss.backward()

    def loader(self, data: Any, batch_size: int) -> Any:
        """Batches of all ranks together, of which each has its share."""
        rows = torch.utils.data.TensorDataset(data)
        if self.alone:
            return torch.utils.data.DataLoader(rows, batch_size)
        return rd.loader(rows, batch_size=batch_size, comm=self.comm, shuffle=False, quiet=True)

    # ---- what has another name on ranks

    def adding(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.alone else rd.accumulate(model)

    def whole(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.alone else rd.whole(model)

    def clip(self, optimizer: Any, limit: float) -> Any:
        if self.alone:
            groups = [one for group in optimizer.param_groups for one in group["params"]]
            return torch.nn.utils.clip_grad_norm_(groups, limit)
        return optimizer.clip_grad_norm_(limit)

    def clip_value(self, optimizer: Any, limit: float) -> None:
        if self.alone:
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_value_(group["params"], limit)
        else:
            optimizer.clip_grad_value_(limit)

    def take_state(self, model: Any, optimizer: Any, other: Any, its: Any) -> None:  # noqa: ARG002
        """Load the state of another model's optimizer, which is that of one device."""
        optimizer.load_state_dict(its.state_dict())

    def state(self, model: Any) -> State:
        """The whole model, its buffers too."""
        found = model.state_dict() if self.alone else rd.full_state_dict(model)
        return {name: one.detach().clone() for name, one in found.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program under a strategy: right, the name of a typed refusal, or a defect."""

    word: str
    told: str = ""  # by the error, or how far off

    @property
    def good(self) -> bool:
        return self.word == "right" or self.word.startswith("refused")


def alone(program: Program, size: int) -> State:
    """What one device makes of a program."""
    return program(Place(size))


def largest(found: State, expected: State) -> tuple[float, str]:
    """The largest difference, as a share of the largest element, and where."""
    if found.keys() != expected.keys():
        return float("inf"), f"names {sorted(found.keys() ^ expected.keys())}"
    worst = 0.0, ""
    for name, one in expected.items():
        if one.numel() == 0:
            continue
        if found[name].shape != one.shape:
            return float("inf"), f"shape of {name}"
        by = (found[name].to(torch.complex128) - one.to(torch.complex128)).abs().max().item()
        scale = one.to(torch.complex128).abs().max().item()
        relative = by / scale if scale else by
        if not relative <= worst[0]:
            worst = relative, name
    return worst


def judge(
    program: Program, way: Any, size: int, expected: State, engine: str = "threads"
) -> tuple[Verdict, list[State]]:
    """Run a program on ranks and say what came of it; never raises."""
    errors: dict[int, BaseException] = {}  # of threads, which say more than the first of all ranks

    def be_rank(comm: Any) -> dict[str, Any]:
        try:
            found = program(Place(size, comm, way))
        except Exception as error:
            errors[comm.rank] = error
            raise
        return {name: one.numpy() for name, one in found.items()}

    begun = time.monotonic()
    try:
        arrays = rd.run(be_rank, size, engine, timeout=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - judged below
        raised: list[BaseException] = [as_raised(error) if isinstance(error, RankFailed) else error]
        return _of_errors([*errors.values()] or raised, begun), []
    states = [{name: torch.from_numpy(one) for name, one in rank.items()} for rank in arrays]
    off, name = max(largest(one, expected) for one in states)
    right = off <= TOLERANCE
    return Verdict("right" if right else "WRONG", "" if right else f"{name} by {off:.3g}"), states


def _of_errors(errors: list[BaseException], begun: float) -> Verdict:
    """A refusal names itself; who merely lost another rank by it says nothing of its own."""
    strange = [one for one in errors if not isinstance(one, RoundelayError)]
    if strange:
        return Verdict(f"RAW {type(strange[0]).__name__}", str(strange[0]))
    if any(isinstance(one, CollectiveTimeout) for one in errors):
        return Verdict("HANG", f"{time.monotonic() - begun:.0f} s: {errors[0]}")
    names = sorted({type(one).__name__ for one in errors})
    own = [name for name in names if name != "PeerLost"] or names
    first = next(one for one in errors if type(one).__name__ == own[0])
    return Verdict(f"refused: {', '.join(own)}", str(first))
