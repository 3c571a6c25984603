"""What the ranks tell one another at the end of every backward pass.

One small all-reduce: which parameters got a gradient on any rank, which got one that is not finite,
and how much the losses weigh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, NotFiniteError
from roundelay.reductions import Array
from roundelay.training._setup import Parameter
from roundelay.training._shared_gradients import SharedGradients
from roundelay.training._step import Rates, StepState

TORN = (
    "A backward pass raised an error on rank {ranks}, so that its gradients are missing. Nothing "
    "was updated: call zero_grad() on every rank and repeat the batch, or go on with the next one."
)
NUMBERS = 5  # that are told beside the flags of every parameter
SHOWN = 5  # things done to gradients that a message has


class PassReport:
    """What all ranks together know of a backward pass."""

    def __init__(self, numbers: Array, count: int, size: int) -> None:
        self.used = numbers[:count] > 0
        self.broken = numbers[count : 2 * count] > 0
        rest: list[float] = numbers[2 * count :].tolist()
        self.weight, self.weighed, self.torn, total, squares, *more = rest
        self.late = any(more)  # whether gradients came too late on some rank, if that is told
        #: Whether all ranks take the same step of the same weights: their marks have no variance.
        self.in_step = size * squares == total * total
        self._size = size
        #: Whether ranks with other parts of the model had gradients that were not finite.
        self.broken_beside = False
        self.step: StepState | None = None

    @property
    def all_finite(self) -> bool:
        """Whether every gradient is finite, of every part of the model."""
        return not (self.broken_beside or self.broken.any())

    def factor(self) -> float | None:
        """Return what a sum over ranks must be multiplied with; None where the mean is meant."""
        if self.weighed == 0:
            return None
        if self.weighed != self._size:
            raise InvalidArgumentError(
                f"{self.weighed:.0f} of {self._size} ranks used rd.backward(…, weight=…) in this "
                f"step, the others loss.backward(). Use one of them on every rank."
            )
        if self.weight == 0:
            raise InvalidArgumentError("All weights of this step are 0, so there is no mean.")
        return 1 / self.weight


def tell_all(
    comm: Communicator,
    used: Iterable[bool],
    broken: Iterable[bool],
    step: StepState,
    *,
    late: bool | None = None,
) -> PassReport:
    """Bring what this rank knows together with what the others do.

    Ranks that are in different steps, or of whom one has no gradients to bring, raise here.
    """
    flags = [float(one) for one in used]
    bad = [float(one) for one in broken]
    weighed, torn = float(step.weighed > 0), float(step.untold)
    mark = step.mark
    more = [] if late is None else [float(late)]
    numbers = np.array([*flags, *bad, step.weight, weighed, torn, mark, mark**2, *more])
    step.untold = False
    comm.all_reduce(numbers)
    told = PassReport(numbers, len(flags), comm.size)
    told.step = step
    apart = bool(told.torn) or not told.in_step
    told.broken_beside = _settle(
        comm, step, apart=apart, torn=bool(torn), broken=not told.all_finite
    )
    return told


def _settle(
    comm: Communicator, step: StepState, *, apart: bool, torn: bool = False, broken: bool = False
) -> bool:
    """Raise if ranks are apart, also of those with other parts of the model.

    Returns whether the latter have gradients that are not finite.
    """
    beside = step.beside
    if beside is None:
        if apart:
            step.known = True
            _refuse_apart(comm, step, torn=torn)
        step.told()
        return False
    mark = step.shared_mark
    alike = step.alike
    grads = [] if alike is None else alike.numbers()
    numbers = np.array([float(apart), float(broken), mark, mark**2, *grads])
    others, bad, total, squares, *grads = beside.all_reduce(numbers).tolist()
    drifted = alike is not None and not bad and alike.differ(beside.size, grads)
    if others or drifted or beside.size * squares != total * total:
        step.known = True
        _refuse_beside(comm, beside, step, apart=apart, torn=torn)
    step.told()
    return bool(bad)


def _refuse_beside(
    comm: Communicator, beside: Communicator, step: StepState, *, apart: bool, torn: bool
) -> None:
    """Raise what ranks with other data have found, on those with other parts of the model too."""
    text = ""
    if apart:
        try:
            _refuse_apart(comm, step, torn=torn)
        except CollectiveMismatch as error:
            text = str(error)
    mine = (text, step.number, step.place, step.rates, (step.shares, step.given), step.frozen,
            (step.shared_written, step.how),
            (step.calls, step.shared_done, [*step.shared_deeds]),
            {} if step.alike is None else step.alike.marks())  # fmt: skip
    texts, numbers, places, rates, rows, frozen, edits, deeds, grads = zip(
        *beside.all_gather_object(mine), strict=True
    )
    for theirs in filter(None, texts):
        raise CollectiveMismatch(text or f"{theirs} This is of ranks beside this one in the mesh, "
                                 f"which have other parts of the model.")  # fmt: skip
    step.given = 0  # which is told once
    try:
        names = range(beside.size)
        _refuse_places(places, names)
        _refuse_rates(rates, names)
        _refuse_rows(rows)
        refuse_frozen(frozen, names)
        _refuse_edits(step, edits, names)
        _refuse_deeds(deeds, names)
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"{error} (These ranks have parts of one model, and are counted along their axes of "
            f"the mesh. The norm of all gradients is that of optimizer.clip_grad_norm_.)"
        ) from None
    if problem := SharedGradients.apart(grads):
        raise CollectiveMismatch(problem)
    told = ", ".join(f"one in step {number}" for number in numbers)
    raise CollectiveMismatch(
        f"The ranks that have parts of one model in this mesh are apart: {told}. Call the model, "
        f"backward and step() in every step on every rank."
    )


def _refuse_rows(every: Sequence[object]) -> None:
    if len({repr(one) for one in every}) > 1:
        raise CollectiveMismatch(
            "The ranks that have parts of one model in this mesh gave it different rows, and need "
            "the same ones. Nothing was updated. rd.loader(…, mesh=mesh) gives ranks other rows "
            "along dp and ep only; do so with rows of your own, too."
        )


def compare_steps(comm: Communicator, step: StepState) -> None:
    """Raise, on every rank, if since the last backward pass one did what the others did not.

    For where training may end, since no pass after the last step would tell.
    """
    mark = step.mark
    numbers = np.array([mark, mark**2])
    total, squares = comm.all_reduce(numbers).tolist()
    _settle(comm, step, apart=comm.size * squares != total * total)


def told_bytes(count: int) -> int:
    """Return how many bytes a model with so many parameters has to tell.

    >>> told_bytes(3)
    88
    """
    return 8 * (2 * count + NUMBERS)


def _refuse_apart(comm: Communicator, step: StepState, *, torn: bool) -> None:
    every = comm.all_gather(np.array([float(torn), float(step.number)])).tolist()
    names = _names(step, comm.size)
    broken = [rank for rank, (raised, _) in zip(names, every, strict=True) if raised]
    if broken:
        raise CollectiveMismatch(TORN.format(ranks=", ".join(map(str, broken))))
    if len({number for _, number in every}) == 1:
        places, step.raised = comm.all_gather_object(step.place), 0  # which is told once
        _refuse_places(places, names)
        _refuse_rates(comm.all_gather_object(step.rates), names)
        refuse_frozen(comm.all_gather_object(step.frozen), names)
        _refuse_edits(step, comm.all_gather_object((step.written, step.how)), names)
        _refuse_deeds(comm.all_gather_object((step.calls, step.done, [*step.deeds])), names)
        raise CollectiveMismatch(
            "The ranks have stepped different optimizers of this model since the last backward "
            "pass, so that their weights are no longer the same. Step the same ones on every rank."
        )
    told = ", ".join(
        f"rank {rank} in step {steps:.0f}" for rank, (_, steps) in zip(names, every, strict=True)
    )
    raise CollectiveMismatch(
        f"The ranks bring gradients of different steps together: {told}. A rank has called "
        f"optimizer.step() without a backward pass. Call the model and backward in every step on "
        f"every rank, with a loss times 0 where a rank has no data."
    )


def _names(step: StepState, size: int) -> Sequence[int]:
    """Return what a mesh calls ranks with other data; without one they are called as they are."""
    return step.numbers if len(step.numbers) == size else range(size)


def _refuse_places(
    every: Sequence[tuple[list[tuple[int, int, int]], int]], names: Sequence[int]
) -> None:
    if len({repr(one) for one in every}) == 1:
        return
    if len({repr(places) for places, _ in every}) == 1:
        ranks = ", ".join(
            str(rank) for rank, (_, raised) in zip(names, every, strict=True) if raised
        )
        raise CollectiveMismatch(
            f"The model raised an error on rank {ranks}, which was caught there, so that the ranks "
            f"may be at different batches. Nothing was updated: have all ranks leave the batch out "
            f"or repeat it, and call zero_grad(). A loader of rd.loader tells which batch it is."
        )
    text = "; ".join(
        f"rank {rank} in {' and '.join(map(_placed, places)) or 'none'}"
        for rank, (places, _) in zip(names, every, strict=True)
    )
    raise CollectiveMismatch(
        f"The ranks bring gradients of different batches of their loaders together: {text}. A rank "
        f"may have caught an error and gone on with the next batch. Nothing was updated: leave a "
        f"batch out on all ranks, or on none."
    )


def _placed(place: tuple[int, int, int]) -> str:
    return f"epoch {place[0]} batch {place[1]}" + (f" part {place[2]}" if place[2] else "")


def _refuse_rates(every: Sequence[Rates], names: Sequence[int]) -> None:
    for rank, theirs in zip(names, every, strict=True):
        for (group, key, value), (_, _, other) in zip(every[0], theirs, strict=False):
            if repr(value) != repr(other):
                raise CollectiveMismatch(
                    f"The optimizers of the ranks differ: {key}={value!r} in group {group} on rank "
                    f"{names[0]}, and {other!r} on rank {rank}. Set one for all ranks. A scheduler "
                    f"that looks at a value, as ReduceLROnPlateau does, needs one for all, as "
                    f"rd.evaluate gives it."
                )


def _refuse_deeds(every: Sequence[tuple[int, int, list[str]]], names: Sequence[int]) -> None:
    if len({calls for calls, _, _ in every}) == 1 and any(one != every[0] for one in every):
        lists = [deeds for _, _, deeds in every]
        same = takewhile(lambda ones: len({*ones}) == 1, zip(*lists, strict=False))
        first = len([*same])  # in which they differ
        text = "\n".join(
            f"  rank {rank}: {', then '.join(deeds[first : first + SHOWN]) or 'nothing more'}"
            for rank, deeds in zip(names, lists, strict=True)
        )
        raise CollectiveMismatch(
            f"Since the last backward pass the ranks did different things to their gradients, or "
            f"to the optimizer's state, so that their weights are no longer the same:\n{text}\n"
            f"Do the same on every rank, with the same values."
        )


def refuse_frozen(every: Sequence[dict[int, str]], names: Sequence[int]) -> None:
    """Raise if ranks have frozen different parameters, which each tells by number and name."""
    for rank, theirs in zip(names, every, strict=True):
        for index in sorted(every[0].keys() ^ theirs.keys()):
            name = (every[0] | theirs)[index]
            here, there = (names[0], rank) if index in every[0] else (rank, names[0])
            raise CollectiveMismatch(
                f"The ranks train different parameters: {name} is frozen on rank {here} and not on "
                f"rank {there}. Freeze and unfreeze the same on every rank, and call "
                f"zero_grad() before going on."
            )


def _refuse_edits(
    step: StepState,
    every: Sequence[tuple[dict[str, int], dict[str, str]]],
    names: Sequence[int],
) -> None:
    first, did = every[0]
    step.written.update({name: 0 for one, _ in every for name in one})  # to be compared once more
    for rank, (theirs, how) in zip(names, every, strict=True):
        for name in sorted({*first, *theirs}):
            if first.get(name) != theirs.get(name):
                raise CollectiveMismatch(
                    f"The ranks have different weights: since the last step rank {names[0]} and "
                    f"rank {rank} did not write the same into the parameter {name}. "
                    f"{_written(f'Rank {names[0]}', name, first, did)}, and "
                    f"{_written(f'rank {rank}', name, theirs, how)}. Write the same on every "
                    f"rank, as load_state_dict does, and call zero_grad() before going on."
                )


def _written(who: str, name: str, written: dict[str, int], how: dict[str, str]) -> str:
    """Say what a rank wrote into a parameter."""
    if name in how:
        return f"{who} did {how[name]} last"
    if name in written:
        return f"{who} has written values of its own"
    return f"{who} has written nothing"


def refuse_broken(
    comm: Communicator, told: PassReport, mine: Iterable[bool], parameters: list[Parameter]
) -> None:
    """Raise on every rank if a gradient is not finite, naming the parameters and the ranks."""
    if told.all_finite:
        return
    every = comm.all_gather(np.array([float(any(mine))]))[:, 0]
    ranks = [rank for rank, one in enumerate(every) if one]
    names = [parameters[index].name for index in np.flatnonzero(told.broken)]
    step = told.step
    if step is not None and step.beside is not None:
        mine_too = names, [step.numbers[rank] for rank in ranks]
        pairs = step.beside.all_gather_object(mine_too)
        names = [*dict.fromkeys(name for others, _ in pairs for name in others)]
        ranks = sorted({rank for _, others in pairs for rank in others})
    raise NotFiniteError(names, ranks)
