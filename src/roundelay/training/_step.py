"""What one step of a model depends on beside its gradients: in one object, with one reset."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.training._origins import Origins, Turn
from roundelay.training._shared_gradients import SharedGradients

Rates = tuple[tuple[int, str, Any], ...]  # group, option, value
MARKS = 1 << 22  # different marks of a step
ALIKE = 0.02  # by which quotients of rounded gradients differ that were multiplied by one number
TOGETHER = ("zero_grad()", "step()", "clip_grad_")  # what stages of a pipeline do alike
DEEDS = 100  # things done to gradients that are kept in mind, where no backward pass tells them
#: How values of tensors are told, which ranks with other parts of a model do not share.
VALUES = re.compile(r"(tensor|shard|…) [0-9a-f]{8}")

AGAIN = (
    "A backward pass would add to gradients that are averaged already, and the average would be "
    "wrong. Call zero_grad() before, of every optimizer of the model, or put all but the last one "
    "into `with rd.accumulate(model)`."
)
MIXED = (
    "Some backward passes of this step were rd.backward(…, weight=…) and others loss.backward(), "
    "which has no weight. Use one of them for all passes of a step, or call zero_grad() between."
)
TORN = (
    "A backward pass of this step raised an error, so its gradients are not complete. Call "
    "zero_grad() and repeat the whole batch, or go on with the next one."
)
OTHER = 1000  # calls of one optimizer that look like one call of the next
PART = (
    "One optimizer forgets its gradients between the weighed backward passes of a step, and the "
    "weights would count passes that are gone. Call zero_grad() of every optimizer of the model."
)
TWO_LOADERS = (
    "A loader was left in the middle of a batch, whose gradients wait for the rest of it, and now "
    "another loop brings gradients of its own. Finish the batch, or call zero_grad() before."
)
FOREIGN = (
    "A loader cuts its batches into micro-batches of another model, the one it was given as "
    "model=, and this model's optimizer would step at each of them. Train each model in a loop of "
    "its own, give it whole batches, or put its backward passes into `with rd.accumulate(model)`."
)
STANDING = (
    "optimizer.step() was called twice while a loader's batch has micro-batches to come, and does "
    "nothing until the last of them. Call it once for each micro-batch; and before you train on "
    "something else, finish the loop, leave it by break, or close its iterator."
)
RESCHEDULED = (
    "The options of the optimizer changed between the micro-batches of one batch: {before} became "
    "{after}. A scheduler steps once for each batch: write scheduler = rd.scheduler(scheduler) "
    "before the loop, or `if loader.last_of_step: scheduler.step()`."
)


@dataclass(slots=True, weakref_slot=True)
class StepState:
    """The step of one model at hand, on one rank.

    `begin` forgets all of it, as `zero_grad` does. What says where in the program we are (inside
    `rd.accumulate`, in the loop of a loader) stays, and so do the numbers that count.
    """

    number: int = 0  # steps that were taken
    fit: int = 0  # steps on scaled losses, since `prepare`, that the optimizer took
    skipped: int = 0  # and those that it did not, as gradients had overflowed
    #: Parameters that the user has written into since the ranks last agreed on them, and what.
    written: dict[str, int] = field(default_factory=dict)
    #: Parameters that are frozen though they were trained at `prepare`, by their numbers.
    frozen: dict[int, str] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)  # it was done last
    #: What was done to gradients and state since then, which all ranks must do alike: the latest
    #: in words, and all of it as a number.
    deeds: deque[str] = field(default_factory=lambda: deque(maxlen=DEEDS))
    done: int = 0
    #: The same, and what was written, as ranks with other parts of the model must have it, too.
    shared_deeds: deque[str] = field(default_factory=lambda: deque(maxlen=DEEDS))
    shared_done: int = 0
    shared_written: dict[str, int] = field(default_factory=dict)
    calls: int = 0  # of step(), those of other optimizers than the first with more weight
    count: int = 0  # backward passes ever
    inside: int = 0  # how many `rd.accumulate` we are in
    opened: int = 0  # how many `rd.whole` we are in
    optimizers: list[Callable[[], Any]] = field(default_factory=list)  # weak: they have the model
    #: Told that a backward pass begins, where somebody takes it down; weak, too.
    on_backward: Callable[[], None] | None = None
    rates: Rates = ()  # options of all optimizers, as they were last seen
    rated: int = 0  # a number for those
    agreed: Rates = ()  # as all ranks had them last
    turns: list[Turn] = field(default_factory=list)  # loops over loaders that we are in
    #: Where they are: epoch, batch and micro-batch of each.
    places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    dealt: dict[int, tuple[int, int]] = field(default_factory=dict)  # this rank's share, of many
    raised: int = 0  # calls of the model since all ranks had the same mark
    foreign: Turn | None = None  # a loop over micro-batches of another model
    origins: Origins = field(default_factory=Origins)  # of what the model is given
    beside: Communicator | None = None  # ranks of a mesh with the same data and other parts
    numbers: Sequence[int] = ()  # what the mesh calls the ranks with other data
    divided: frozenset[str] = frozenset()  # parameters of which those ranks have other parts
    experts: frozenset[str] = frozenset()  # parameters of which ranks with other data do
    alike: SharedGradients | None = None  # gradients that those ranks all have
    given: int = 0  # a number for what the model was given first, which those ranks share
    offered: float | None = None  # the weight that `rd.backward` gives to passes that begin now
    once: bool = False  # whether gradients that are averaged would be averaged again
    # ---- of this step
    weight: float = 0.0  # of all losses on this rank
    weighed: int = 0  # passes that had a weight
    passes: int = 0
    waiting: int = 0  # passes whose gradients were not brought together yet
    shared: bool = False  # whether the gradients there are, are those of all ranks
    torn: bool = False  # whether a pass raised in the middle
    untold: bool = False  # whether the other ranks have yet to hear of that
    known: bool = False  # of a pipeline, whose steps have several passes: whether they have
    staged: bool = False  # whether it is one
    #: Of a pipeline, too: by what the user has multiplied gradients, by the parameters' numbers,
    #: and by what all were multiplied that were stepped on since stages compared it; 0 is nothing.
    scaling: dict[int, float] = field(default_factory=dict)
    scaled: float = 0.0
    together: list[str] = field(default_factory=list)  # what stages do alike, since they compared
    owner: Turn | None = None  # the loop whose batch the passes belong to
    #: Of each optimizer, its options at the first micro-batch.
    options: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    by: set[int] = field(default_factory=set)  # optimizers that have taken it
    let_go: set[int] = field(default_factory=set)  # optimizers that forgot their gradients
    verdict: bool | None = None  # whether its gradients are fit for a step, once that is known

    def begin(self) -> None:
        """Begin another step: nothing of this one counts any more."""
        if (self.waiting or self.shared) and not self.torn:
            self.did("zero_grad()")
        self._used()
        self.options.clear()
        self.scaling.clear()
        self.waiting = 0
        self.shared = self.torn = False
        self._fresh()

    def _used(self) -> None:
        """Forget what the optimizer has used; gradients stay until they are forgotten."""
        self.weight, self.weighed, self.passes = 0.0, 0, 0
        self.owner = None

    def _fresh(self) -> None:
        self.by.clear()
        self.let_go.clear()
        self.verdict = None

    def wrote(self, name: str, what: str | int) -> None:
        """Note that the user has written into a parameter; how, or a number for what it is now."""
        if isinstance(what, str) and name in self.experts:  # other ranks have others of that name
            what = VALUES.sub(r"\1", what)
        self.written[name] = zlib.crc32(str(what).encode(), self.written.get(name, 0))
        if isinstance(what, str):
            self.how[name] = what
        if self.beside is not None:
            told = VALUES.sub(r"\1", what) if isinstance(what, str) else str(what)
            told = "" if name in self.divided and not isinstance(what, str) else told
            before = self.shared_written.get(name, 0)
            self.shared_written[name] = zlib.crc32(told.encode(), before)

    def did(self, what: str, shared: str | None = None) -> None:
        """Note something that all ranks must do alike; `shared` is how those beside this one do."""
        self.deeds.append(what)
        self.done = zlib.crc32(what.encode(), self.done)
        if self.staged and what.startswith(TOGETHER):
            self.together.append(what.partition(" with ")[0])
        if self.beside is not None:
            told = VALUES.sub(r"\1", what) if shared is None else shared
            self.shared_deeds.append(told)
            self.shared_done = zlib.crc32(told.encode(), self.shared_done)

    def forget_deeds(self) -> None:
        """Have nothing of that compared."""
        self.deeds.clear()
        self.shared_deeds.clear()
        self.done = self.shared_done = 0

    # ---- several optimizers

    def scales(self, index: int, factor: float) -> None:
        """Note that the user has multiplied a gradient."""
        self.scaling[index] = self.scaling.get(index, 1.0) * factor

    def all_scaled(self, used: Collection[int]) -> None:
        """Note, before a step on gradients, if the user has multiplied all by one number."""
        factors = [self.scaling.get(index, 0.0) for index in used]
        known = sorted(one for one in factors if not isnan(one))
        if known and known[0] > 0 and known[-1] - known[0] <= known[-1] * ALIKE:
            self.scaled = known[-1]

    def stepped(self, place: int) -> None:
        """Note that an optimizer has stepped; the first one of a step, or one again, counts."""
        if not self.by or place in self.by:
            self.number += 1
            self.by.clear()
        self.by.add(place)
        self.calls += 1 + OTHER * place
        self.look_at_rates()
        agreed = self.rates is self.agreed
        new = [rate for rate in self.rates if not agreed and rate not in self.agreed]
        told = ", ".join(f"{key}={value!r}" for _, key, value in new)
        self.did(f"step() with {told}" if told else "step()")
        self.options.pop(place, None)
        self._used()

    def forgets(self, place: int, count: int) -> None:
        """Note that one of so many optimizers forgets its gradients; the last ends the step."""
        self.let_go.add(place)
        if len(self.let_go) == count:
            self.begin()
        elif self.waiting and self.weighed:
            raise InvalidArgumentError(PART)

    # ---- loaders

    @property
    def turn(self) -> Turn | None:
        """The loop over a loader that gave out data last."""
        return self.turns[-1] if self.turns else None

    @property
    def holds(self) -> bool:
        """Whether a loader has more micro-batches of this batch, which until then only add up."""
        return self.turn is not None and self.turn.more

    @property
    def adds_up(self) -> bool:
        """Whether gradients of a loader's batch are there that its other micro-batches add to."""
        return (
            self.waiting > 0
            and self.owner is not None
            and self.owner is self.turn
            and self.owner.parts > 1
            and not self.torn
        )

    @property
    def parts(self) -> int:
        """How many micro-batches the batch at hand has."""
        return 1 if self.turn is None else self.turn.parts

    @property
    def factor(self) -> float:
        """What gradients of a mean over this rank's rows are multiplied with, to count exactly."""
        return 1.0 if self.offered is not None else self.origins.factor(self.turn)

    @property
    def accumulating(self) -> bool:
        """Whether backward passes only add up."""
        return self.inside > 0 or self.holds

    @property
    def mark(self) -> float:
        """A number that ranks share if they are in one step, of the same weights and rates.

        Its square is exact, and so is the sum of hundreds of those.
        """
        edits = hash(tuple(sorted(self.written.values()))) if self.written else 0
        frozen = hash(tuple(self.frozen)) if self.frozen else 0
        self.look_at_rates()
        place = zlib.crc32(repr(self.place).encode())
        return float((place + self.calls + edits + frozen + self.rated + self.done) % MARKS)

    @property
    def shared_mark(self) -> float:
        """A number that ranks with other parts of the model share, too, if they are in one step."""
        self.look_at_rates()
        place = zlib.crc32(repr((self.place, self.shares)).encode())
        edits = hash(tuple(sorted(self.shared_written.values()))) if self.shared_written else 0
        frozen = hash(tuple(self.frozen)) if self.frozen else 0
        deeds = edits + frozen + self.shared_done + self.given
        return float((place + self.calls + self.rated + deeds) % MARKS)

    @property
    def shares(self) -> list[tuple[int, int]]:
        """Which rows of their batches loaders give this rank: which share, of how many."""
        return [*self.dealt.values()]

    @property
    def place(self) -> tuple[list[tuple[int, int, int]], int]:
        """Where loaders are; without one, how often the model raised an error that was caught."""
        return [*self.places.values()], 0 if self.places else self.raised

    def look_at_rates(self) -> None:
        """See the options of optimizers, which all ranks share: learning rates and the like."""
        alive = [one for one in (weak() for weak in self.optimizers) if one is not None]
        groups = [group for one in alive for group in vars(one)["param_groups"]]
        now = tuple(
            (number, key, _plain(value))
            for number, group in enumerate(groups)
            for key, value in group.items()
            if key != "params"
        )
        if now != self.rates:
            self.rates, self.rated = now, zlib.crc32(repr(now).encode())

    def state_edits(self) -> list[Any]:
        """Return what looks at the state of optimizers, where the user has asked for it."""
        alive = (weak() for weak in self.optimizers)
        return [vars(one)["edits"] for one in alive if one is not None and "edits" in vars(one)]

    def told(self) -> None:
        """Note that all ranks have the same mark: nothing of it has to be compared again."""
        self.written.clear()
        self.shared_written.clear()
        self.how.clear()
        self.raised = self.given = 0
        if self.alike is not None:
            self.alike.told()
        self.forget_deeds()
        self.agreed = self.rates

    # ---- backward passes

    def begin_pass(self) -> None:
        """Count a backward pass, and refuse one that can't be part of this step."""
        self.check_shut("A backward pass")
        owner = self.owner
        if self.passes and owner is not None and owner.more and owner is not self.turn:
            raise InvalidArgumentError(TWO_LOADERS)
        if self.foreign is not None and self.foreign is not self.turn and not self.inside:
            raise InvalidArgumentError(FOREIGN)
        self._fresh()
        self.origins.passes()
        _ = self.factor  # refused here, where nobody weighs
        self.count += 1
        self.passes += 1
        self.owner = self.turn
        if self.offered is not None:
            self.weighed += 1
            self.weight += self.offered
        if self.shared and (self.weighed or self.parts > 1 or self.once):
            raise InvalidArgumentError(AGAIN)
        if self.weighed not in (0, self.passes):
            raise InvalidArgumentError(MIXED)

    def end_pass(self, *, shared: bool) -> None:
        """Note that a pass is over, and whether the ranks have brought their gradients together."""
        self.waiting = 0 if shared else self.waiting + 1
        self.shared = self.shared or shared

    # ---- the optimizer's step

    def wait(self, place: int) -> None:
        """Have an optimizer's step wait for more micro-batches; refuse to for ever."""
        if self.turn is not None:
            if place in self.turn.asked:
                raise InvalidArgumentError(STANDING)
            self.turn.asked.add(place)

    def check_options(self, place: int, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse options that change between the micro-batches of one batch."""
        now = [{key: _plain(one) for key, one in group.items() if key != "params"}
               for group in groups]  # fmt: skip
        before = self.options.setdefault(place, now)
        if now != before:
            changed = next(
                (f"{key}={old[key]!r}", f"{key}={new.get(key)!r}")
                for old, new in zip(before, now, strict=True)
                for key in old
                if old[key] != new.get(key)
            )
            raise InvalidArgumentError(RESCHEDULED.format(before=changed[0], after=changed[1]))

    def check_shut(self, what: str) -> None:
        """Refuse what can't be inside `rd.whole`, where the user has the parameters."""
        if self.opened:
            raise InvalidArgumentError(
                f"{what} is for outside of `with rd.whole(…)`, inside of which the parameters are "
                f"yours to read and write. Leave the block first."
            )

    def check_whole(self) -> None:
        """Refuse a step on gradients of which some are missing, or inside `rd.whole`."""
        self.check_shut("optimizer.step()")
        if self.torn:
            raise InvalidArgumentError(TORN)


def _plain(value: Any) -> Any:  # Any: an option of any optimizer
    """Return what can be compared between ranks; of functions and the like nothing is."""
    if value is None or type(value) in (int, float, bool, str):
        return value
    if isinstance(value, (torch.Tensor, np.generic)):
        return value.tolist() if getattr(value, "is_cpu", True) else "on a device"
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return type(value).__name__
