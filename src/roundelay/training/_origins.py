"""Which batch of a loader a backward pass belongs to: that which the model was given.

Batches that can't be divided evenly weigh differently on each rank, so a pass must be weighed as
the batch it came from, whatever was drawn since. A batch is known by the memory of its tensors,
which views share, and a pass by the outputs of the model that it begins at, or else by what the
model was given since the last one. Where the model was given something else than a batch, the one
at hand counts, unless it might just as well be another one: that is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from roundelay.errors import InvalidArgumentError

UNSURE = (
    "A backward pass can't be told apart: batches of a loader that weigh differently, as their "
    "rows can't be divided evenly between the ranks, are at hand together, and {why}. Train on "
    "each batch before the next one is drawn, with a backward pass of its own; or say the weight "
    "yourself, rd.backward(total, weight=len(rows)); or have batches that divide evenly "
    "(drop_last=True)."
)
MIXED = "the model was given several of them"
OTHER = "what the model was given is none of them"
PARTS = "a micro-batch was kept until its loop had gone on"


class Turn:
    """One pass of a loader over its data: how its batches are cut, and whether one is complete."""

    __slots__ = (
        "asked", "dealt", "factor", "key", "missed", "more", "parts", "place", "seen", "uneven",
    )  # fmt: skip

    def __init__(self, *, uneven: bool = True, dealt: tuple[int, int] = (0, 1)) -> None:
        self.uneven = uneven  # whether there may be batches that can't be divided evenly
        self.dealt = dealt  # which share of every batch this rank has, of how many
        self.parts = 1
        self.place = 0, 0, 0  # epoch, batch and micro-batch
        self.more = False  # whether micro-batches of the batch at hand are to come
        self.factor = 1.0  # of gradients, where micro-batches or ranks have more rows than others
        self.key: tuple[int, ...] = ()  # what weighs the same has the same, on every rank
        self.seen = True  # whether the model ran since the batch was drawn
        self.asked: set[int] = set()  # optimizers whose step() came since, and did nothing
        self.missed = False  # whether it did not with the batch before


class _Known(NamedTuple):
    """A tensor of a batch that was drawn."""

    tensor: weakref.ref[torch.Tensor]
    memory: int
    key: tuple[int, ...]
    factor: float
    turn: Turn
    parts: int


class _Graph:
    """Is there for as long as what the model has computed can be run backward."""

    __slots__ = ("__weakref__",)


class _Given:
    """What the model was given in one call, and what says whether a pass can still begin there."""

    __slots__ = ("graph", "known")

    def __init__(self, known: _Known | None) -> None:
        self.known = known  # None: of no batch that we know
        self.graph: weakref.ref[_Graph] | None = None  # None: nobody has seen an output

    @property
    def matters(self) -> bool:
        """Whether a backward pass may still come from there."""
        if self.graph is not None:
            return self.graph() is not None
        return self.known is None or self.known.tensor() is not None


class Origins:
    """The batches that somebody still holds, and those of them that the model was given last."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._given: list[_Given] = []
        self._calls: list[list[_Given]] = []  # of the model that have not returned
        self._task, self._met = -1, list[_Given]()  # a backward pass, and the outputs it came by
        self._passed = False  # whether a backward pass has begun since
        self._latest: Turn | None = None

    def drawn(self, batch: Any, turn: Turn, *, key: tuple[int, ...]) -> None:
        """Hear of a batch that is about to be handed out."""
        missed = not turn.seen and torch.is_grad_enabled()
        turn.missed = missed and turn.key != key
        turn.key, turn.seen = key, False
        self._latest = turn
        self._known = [one for one in self._known if one.tensor() is not None]
        self._known += [
            _Known(weakref.ref(leaf), memory, key, turn.factor, turn, turn.parts)
            for leaf, memory in _tensors(batch)
        ]

    def given(self, values: Any) -> bool:
        """Hear what the model is given; tell whether it weighs otherwise than an even batch."""
        self._saw()
        if not torch.is_grad_enabled():
            return False
        if self._passed:
            self._given, self._passed = [], False
        memory = {memory for _, memory in _tensors(values)}
        found = [one for one in self._known if one.memory in memory and one.tensor() is not None]
        self._calls.append([_Given(one) for one in found] or [_Given(None)])
        self._given += self._calls[-1]
        return any(one.factor != 1 for one in found)

    def returned(self, output: Any) -> None:
        """Hear what the model has made of it."""
        given = self._calls.pop() if self._calls else []
        self._calls.clear()  # of calls that raised
        graph = _Graph()

        def meet(_: torch.Tensor, graph: _Graph = graph) -> None:  # noqa: ARG001 - it is kept so
            task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no other name
            if task != self._task:
                self._task, self._met = task, []
            self._met += given

        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(meet)  # type: ignore[no-untyped-call]
                for one in given:
                    one.graph = weakref.ref(graph)

    @property
    def pending(self) -> bool:
        """Whether a pass may still come from a batch that weighs otherwise than an even one."""
        return any(
            one.known is not None and one.known.factor != 1 and one.matters for one in self._given
        )

    def passes(self) -> None:
        """Hear that a backward pass begins."""
        self._passed = True
        self._saw()

    def _saw(self) -> None:
        if self._latest is not None:
            self._latest.seen = True

    def factor(self, turn: Turn | None) -> float:
        """Return what the gradients of this pass are multiplied with; `turn` is that at hand."""
        if not self._known:
            return 1.0 if turn is None else turn.factor
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as above
        met = self._met if task == self._task != -1 else []
        given = met or [one for one in self._given if one.matters]
        known = [one.known for one in given if one.known is not None]
        if known and len(known) == len(given):
            if len({one.key for one in known}) > 1:
                raise InvalidArgumentError(UNSURE.format(why=MIXED))
            first = known[0]
            if first.parts > 1 and first.turn is not turn:
                raise InvalidArgumentError(UNSURE.format(why=PARTS))
            return first.factor
        key = () if turn is None else turn.key
        alive = {one.key for one in self._known if one.tensor() is not None}
        if alive - {key} or (turn is not None and turn.missed):
            raise InvalidArgumentError(UNSURE.format(why=OTHER))
        return 1.0 if turn is None else turn.factor


def _tensors(values: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensors in a structure, and where their memory begins."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            try:
                yield leaf, leaf.untyped_storage().data_ptr()
            except (NotImplementedError, RuntimeError):  # it has no memory of its own
                continue
