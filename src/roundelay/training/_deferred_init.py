"""Remembers how tensors were made, so that they can be let go and made again, bit for bit.

While a tape runs, everything is computed as ever, but the memory of a model's parameters is let go
after every operation on them. Each operation is written down, with the state of the random numbers
before it, so that what a tensor depends on can be played back whenever its elements are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from roundelay.errors import InvalidArgumentError
from roundelay.training.shards.operands import tensors_in, written_by

#: These need nothing of what was there before.
FILLS = {"aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_", "aten::random_"}
_drawing = threading.Lock()  # one at a time has torch's random numbers


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """A tensor that was computed with: where it lay, not what was there."""

    number: int  # of its storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _RecordedCall:
    """An operation that wrote something."""

    func: Any  # Any: torch's operators have no public type
    args: Any  # with places where there were tensors
    kwargs: Any
    random: torch.Tensor | None  # the state of the random numbers before it
    results: list[int]  # the storage of each tensor that came out
    writes: frozenset[int]
    reads: frozenset[int]
    fills: bool  # whether it needs nothing of what was there before


class DeferredInit(TorchDispatchMode):
    """Writes down how tensors are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines: list[_RecordedCall] = []
        self._numbers: dict[int, int] = {}
        # Torch gives no address to another storage for as long as somebody knows it weakly.
        self._known: list[StorageWeakRef] = []
        self._nbytes: list[int] = []
        self._let_go: set[int] = set()  # storages that have memory only while it is needed

    # ---- writing

    def __torch_dispatch__(
        self,
        func: Any,  # Any: see above
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, with all that is needed there, and write down what was written."""
        options = dict(kwargs or {})
        given, changed = tensors_in((args, options)), written_by(func, args, options)
        fills = func._schema.name in FILLS and all(map(_covers, changed))  # noqa: SLF001 - torch's
        for tensor in given:
            self._bring(tensor, anew=fills)
        generator, random = options.get("generator"), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            random = torch.get_rng_state() if generator is None else generator.get_state()
        places = tree_map(self._place, (args, options))  # before they change
        result = func(*args, **options)
        results = [self._number(one, make=True) for one in tensors_in(result)]
        reads = frozenset(
            place.number for place in tree_leaves(places) if isinstance(place, _TensorPlace)
        )
        writes = frozenset([*map(self._number, changed), *set(results).difference(reads)])
        if writes:  # else it looked at something, or made a view of it
            there, named = places
            self._lines.append(
                _RecordedCall(func, there, named, random, results, writes, reads, fills)
            )
        for tensor in given:
            self._drop(tensor)
        return result

    def _place(self, one: Any) -> Any:
        """Return where a tensor lies; a copy of one that was not made here."""
        if not isinstance(one, torch.Tensor):
            return one
        number = self._number(one)
        if number < 0:
            return one.detach().clone()
        return _TensorPlace(
            number, one.dtype, int(one.storage_offset()), tuple(one.size()), one.stride()
        )

    def _number(self, tensor: torch.Tensor, *, make: bool = False) -> int:
        """Return the number of a tensor's storage; -1 for one that was not made here."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - which torch itself compares storages by
        if make and key not in self._numbers:
            self._numbers[key] = len(self._known)
            self._known.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._nbytes.append(storage.nbytes())
        return self._numbers.get(key, -1)

    # ---- letting go

    def let_go(self, tensor: torch.Tensor) -> None:
        """Keep no memory for a tensor from now on, if it was made here."""
        number = self._number(tensor)
        if number >= 0:
            self._let_go.add(number)
            self._drop(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was made here, so that it can be made again."""
        return self._number(tensor) >= 0

    def _drop(self, tensor: torch.Tensor) -> None:
        if self._number(tensor) in self._let_go:
            tensor.untyped_storage().resize_(0)

    def _bring(self, tensor: torch.Tensor, *, anew: bool) -> None:
        number, storage = self._number(tensor), tensor.untyped_storage()
        if number not in self._let_go or storage.nbytes():
            return
        storage.resize_(self._nbytes[number])
        if not anew:
            storage.copy_(self._play(number))

    # ---- playing back

    def recipe(self, tensor: torch.Tensor) -> Recipe:
        """Return what makes a tensor again when it itself is gone."""
        place = self._place(tensor)
        if not isinstance(place, _TensorPlace):
            raise InvalidArgumentError("A tensor was not made while the tape ran.")
        return Recipe(self, place)

    def _play(self, number: int) -> torch.UntypedStorage:
        needed = {number}
        lines: list[_RecordedCall] = []
        for line in reversed(self._lines):
            if line.writes & needed:
                if line.fills:
                    needed -= line.writes
                needed |= line.reads - (line.writes if line.fills else frozenset())
                lines.append(line)
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for line in reversed(lines):
                self._play_line(line, real)
        return real[number]

    def _play_line(self, line: _RecordedCall, real: dict[int, torch.UntypedStorage]) -> None:
        def there(one: Any) -> Any:
            if not isinstance(one, _TensorPlace):
                return one
            if one.number not in real:  # about to be filled
                real[one.number] = torch.empty(
                    self._nbytes[one.number], dtype=torch.uint8
                ).untyped_storage()
            return laid(one, real[one.number])

        args, kwargs = tree_map(there, (line.args, line.kwargs))
        made = _drawn(line, args, kwargs)
        for number, tensor in zip(line.results, tensors_in(made), strict=True):
            real.setdefault(number, tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one tensor."""

    tape: DeferredInit
    place: _TensorPlace

    def make(self) -> torch.Tensor:
        """Make it, as it was when the tape ended."""
        return laid(self.place, self.tape._play(self.place.number))  # noqa: SLF001 - its other half


def laid(place: _TensorPlace, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the tensor that lies there in a storage."""
    made = torch.empty(0, dtype=place.dtype, device=storage.device)
    return made.set_(storage, place.offset, place.size, place.stride)


def _drawn(line: _RecordedCall, args: Any, kwargs: Any) -> Any:
    """Compute a line with the random numbers that it had."""
    if line.random is None:
        return line.func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        own = torch.Generator().set_state(line.random)
        return line.func(*args, **{**kwargs, "generator": own})
    with _drawing:
        before = torch.get_rng_state()
        torch.set_rng_state(line.random)
        try:
            return line.func(*args, **kwargs)
        finally:
            torch.set_rng_state(before)


def _covers(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has all elements of its storage."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return bool(dense) and tensor.nbytes == tensor.untyped_storage().nbytes()
