"""What ranks tell one another around a call of a pipeline: all of them go on, or none does.

Where replicas step together, they are told, too: who went on alone would wait for gradients.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, NotFiniteError, RankFailed
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.pipeline._split_batch import tensors_in
from roundelay.reductions import Array
from roundelay.training.shards.operands import digest
from roundelay.training.steps import refuse_frozen

ONE = 1 << 40
ALIKE = 0.01  # by which factors of rounded gradients differ that are the same
SOME = 1024  # elements of a tensor that are looked at in every call but the first


class Told(NamedTuple):
    """What a rank says before a call, as numbers; 0 of a batch that it does not have."""

    x: int  # its form
    target: int
    micro_batches: int
    errand: int  # step, evaluate, or a plain call
    trained: int  # which parameters are: it decides which gradients travel
    pipeline: int  # which one it is of those over these ranks
    x_rows: int
    target_rows: int
    scaled: int  # by what gradients were multiplied that were stepped on last, in parts of ONE
    steps: int  # how often optimizers were called for one, from 1
    rates: int  # a number for their options
    done: int  # one for what was done by them since the last call; 0 if that is not known
    problem: int  # whether this rank can't

    @property
    def form(self) -> tuple[int, ...]:
        """What decides in which form data goes from stage to stage."""
        return self[:5]


class CallRanks:
    """The ranks that are told of a call: those of all stages, or of all replicas that step."""

    def __init__(self, stages: Communicator, mesh: Mesh | None) -> None:
        self.comm = stages if mesh is None else mesh.comm
        #: The ranks of each pipeline, by stages.
        self.pipelines: list[list[int]] = [list(range(stages.size))]
        if mesh is not None:
            places = np.arange(mesh.comm.size).reshape([*mesh.axes.values()])
            along = np.moveaxis(places, [*mesh.axes].index("pp"), -1)
            self.pipelines = along.reshape(-1, stages.size).tolist()
        self.mine = next(ranks for ranks in self.pipelines if self.comm.rank in ranks)

    def tell(
        self, mine: Told, marks: Sequence[int], problem: str, frozen: dict[int, str]
    ) -> tuple[list[Told], Array]:
        """Return what all ranks say, with their marks; refuse on all what one of them can't do."""
        told = np.array([*mine, *marks], np.int64)
        numbers = self.comm.all_gather(told).reshape(-1, len(told))
        every = [Told(*row) for row in numbers[:, : len(mine)].tolist()]
        if any(each.problem for each in every):
            self._refuse(problem)
        for ranks in self.pipelines:
            _compare(ranks, [every[rank] for rank in ranks])
        alike = [*zip(*self.pipelines, strict=True)]  # ranks of one stage, which train the same
        if any(len({every[rank].trained for rank in same}) > 1 for same in alike):
            those = self.comm.all_gather_object(frozen)
            for same in alike:
                refuse_frozen([those[rank] for rank in same], same)
        return every, numbers[:, len(mine) :]

    def _refuse(self, problem: str) -> NoReturn:
        texts = self.comm.all_gather_object(problem)
        if problem:
            raise InvalidArgumentError(problem)
        rank = next(rank for rank, each in enumerate(texts) if each)
        raise CollectiveMismatch(f"step of Pipeline was refused on rank {rank}: {texts[rank]}")

    def end(self, failure: Exception | None, *, failed: bool, result: float) -> Array:
        """Return every rank's result, or raise on all of them what went wrong on one.

        A rank that has only heard that another one failed has no failure.
        """
        every = self.comm.all_gather(np.array([float(failed), result])).reshape(-1, 2)
        if every[:, 0].any():
            self._raise(failure)
        results: Array = every[:, 1]
        return results

    def _raise(self, own: Exception | None) -> None:
        """Raise, on every rank, what went wrong on the first that failed.

        What others make of that comes after it: gradients that are missing, or not finite.
        """
        told = None
        if own is not None:
            later = isinstance(own, CollectiveMismatch) + 0.5 * isinstance(own, NotFiniteError)
            lines = "".join(traceback.format_exception(own))
            told = [later, type(own).__name__, str(own), lines]
        found = [(rank, each) for rank, each in enumerate(self.comm.all_gather_object(told))
                 if each is not None]  # fmt: skip
        rank, (first, kind, message, lines) = min(found, key=lambda each: each[1][0])
        if own is not None and told is not None and told[0] == first:
            raise own
        if kind == CollectiveMismatch.__name__:
            raise CollectiveMismatch(f"{message} (Rank {rank} says so, of its stage.)")
        raise RankFailed(rank, kind, message, traceback=lines)


def rows_number(value: Any, *, whole: bool) -> int:
    """Return a number for what is in a batch: all of it (`whole`), or some; 0 if there is none."""
    if value is None:
        return 0
    marks = [digest(each if whole else _some(each)) for each in tensors_in(value)]
    return 1 + zlib.crc32(repr(marks).encode())


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements, in other places of each row."""
    if tensor.numel() <= SOME or tensor.layout is not torch.strided:
        return tensor
    return tensor.detach().reshape(-1)[:: tensor.numel() // SOME | 1]


def compare_scaled(ranks: Sequence[int], factors: Sequence[float]) -> None:
    """Refuse gradients that stages have multiplied by numbers of their own, where they did."""
    scaled = [(factor, rank) for rank, factor in zip(ranks, factors, strict=True) if factor]
    least, most = min(scaled, default=(0.0, 0)), max(scaled, default=(0.0, 0))
    if most[0] - least[0] > ALIKE * most[0]:
        raise CollectiveMismatch(
            f"Since the last step all gradients on rank {least[1]} were multiplied by "
            f"{least[0]:.4g}, and those on rank {most[1]}, which has other stages of this "
            f"pipeline, by {most[0]:.4g}; the optimizers have stepped on them. Torch's "
            f"clip_grad_norm_ sees the stages of its rank alone: use optimizer.clip_grad_norm_, "
            f"which sees all. For other rates of some stages there are parameter groups."
        )


def compare_steps(ranks: Sequence[int], steps: Sequence[int]) -> None:
    """Refuse stages of which one has stepped more often than another."""
    most, least = max(steps), min(steps)
    if most != least:
        ahead, behind = ranks[steps.index(most)], ranks[steps.index(least)]
        raise CollectiveMismatch(
            f"optimizer.step() was not called as often on rank {behind} as on rank {ahead}, which "
            f"has other stages of this pipeline: some stages have taken a step that others have "
            f"not. Call it on every rank of pp, or on none."
        )


def compare_done(ranks: Sequence[int], done: Sequence[int]) -> None:
    """Refuse stages of which one has forgotten, clipped or used gradients otherwise."""
    known = [(number, rank) for rank, number in zip(ranks, done, strict=True) if number]
    other = next((each for each in known if each[0] != known[0][0]), None)
    if other is not None:
        raise CollectiveMismatch(
            f"Since the last call of this pipeline optimizer.zero_grad(), step(), clip_grad_norm_ "
            f"or clip_grad_value_ were not called on rank {other[1]} as on rank {known[0][1]}, "
            f"which has other stages: as often, in the same order, with the same limits. Some "
            f"stages would add to gradients, or scale them, where others do not."
        )


class StageRates:
    """Whether stages change their rates together.

    Those that have the same ones at first must have the same ever after; those with groups of their
    own, for rates by layer, must change them in the same steps.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, ...], Sequence[int]] = {}  # of the ranks of each pipeline
        self._before: dict[tuple[int, ...], Sequence[int]] = {}

    def compare(self, ranks: Sequence[int], rates: Sequence[int]) -> None:
        """Refuse rates that one stage alone has changed."""
        key = tuple(ranks)
        first = self._first.setdefault(key, rates)
        changed = [
            one != other for one, other in zip(rates, self._before.get(key, rates), strict=True)
        ]
        self._before[key] = rates
        told = rates if len({*first}) == 1 else changed
        if len({*told}) > 1:
            other = next(rank for rank, one in zip(ranks, told, strict=True) if one != told[0])
            raise CollectiveMismatch(
                f"The options of the optimizer, its learning rate for example, are others on rank "
                f"{other} than on rank {ranks[0]}, which has other stages of this pipeline. Set "
                f"them on every rank of pp alike; for other rates of some layers there are "
                f"parameter groups."
            )


def _compare(ranks: Sequence[int], every: Sequence[Told]) -> None:
    """Refuse what differs between the ranks of one pipeline, where they have it."""
    compare_scaled(ranks, [each.scaled / ONE for each in every])
    compare_steps(ranks, [each.steps for each in every])
    compare_done(ranks, [each.done for each in every])

    def first_other(given: Sequence[int]) -> int | None:
        first = next((number for number in given if number), 0)
        return next((rank for rank, number in zip(ranks, given, strict=True)
                     if number not in (0, first)), None)  # fmt: skip

    other = first_other([each.pipeline for each in every])
    if other is not None:
        numbers = dict(zip(ranks, (each.pipeline for each in every), strict=True))
        raise CollectiveMismatch(
            f"All ranks call the same pipeline, but of those that were made over these ranks, "
            f"rank {ranks[0]} calls number {numbers[ranks[0]]}, and rank {other} number "
            f"{numbers[other]}. Call several pipelines in the same order on every rank."
        )
    other = first_other([each.errand for each in every])
    if other is not None:
        raise CollectiveMismatch(
            f"All ranks call the same of a pipeline, but rank {other} does not do what rank "
            f"{ranks[0]} does: step, evaluate, or a plain call."
        )
    for what in ("x", "target"):
        other = first_other([getattr(each, what) for each in every])
        if other is not None:
            raise CollectiveMismatch(
                f"All ranks pass the same batch to a pipeline, but {what} has other shapes or "
                f"dtypes on rank {other} than on the first rank that has it."
            )
        other = first_other([getattr(each, f"{what}_rows") for each in every])
        if other is not None:
            raise CollectiveMismatch(
                f"All ranks pass the same batch to a pipeline, but {what} has other rows on rank "
                f"{other} than on the first rank that has it: the first stage would compute with "
                f"one batch, and the loss with the targets of another. Give all ranks of pp the "
                f"same rows, as rd.loader(…, mesh=mesh) does, or None to those that need none."
            )
