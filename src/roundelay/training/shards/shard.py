"""A tensor that is divided between the ranks, and behaves as the whole one.

Every rank has a stretch of its elements. What works element by element is done on those. What makes
one number of all elements is computed by all ranks together. Anything else is computed from the
whole tensor, which is gathered for it, alike on every rank. What is written goes to where elements
lie, also through views. So all ranks must come by the same operations, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.part import PartParameter, on_parts, ours, part_of
from roundelay.training.shards.home import Home

__all__ = ["WAY_OUT", "Shard", "View", "nothing"]

WAY_OUT = (
    "Take .full() of it on every rank, rd.full_state_dict(model), or `with rd.whole(module):`."
)

View = Callable[[torch.Tensor], torch.Tensor]
Elements = Callable[[], torch.Tensor]


class Shard(torch.Tensor):
    """What a rank hands out of a divided tensor: it looks like, and computes as, the whole."""

    home: Home
    kind: str  # what it is of its parameter
    elements: Elements  # gives those that are here, flat
    wrote: Callable[[str], None]  # is told when elements were written, and how
    #: A number for what its elements were computed from, where they are nobody's: shared by views.
    past: list[int]
    path: int  # a number for which view it is
    of: tuple[Shard, View] | None  # the tensor that it is a view of, and which one

    def __new__(
        cls,
        home: Home,
        elements: torch.Tensor | Elements,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        kind: str = "tensor",
        wrote: Callable[[str], None] | None = None,
        past: list[int] | None = None,
        of: tuple[Shard, View] | None = None,
        path: int = 0,
        strides: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> Self:
        """Make a tensor of this shape; where elements come later, its dtype is given.

        Its device is the model's unless one is given, wherever elements lie.
        """
        if isinstance(elements, torch.Tensor):
            piece = elements.detach()
            dtype = dtype or piece.dtype
            elements = _always(piece)
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's way
            cls,
            tuple(shape),
            strides=strides,
            dtype=dtype,
            device=device or home.device,
            requires_grad=requires_grad,
        )
        made.home, made.kind, made.of = home, kind, of
        made.elements, made.wrote = elements, wrote or nothing
        made.past, made.path = [0] if past is None else past, path
        if home.sharding is not None and of is None and tuple(shape) == home.shape:
            vars(made)["sharding"] = home.sharding
        return made

    # ---- the elements

    @property
    def piece(self) -> torch.Tensor:
        """The elements that are here, flat: those from `home.start` to `home.stop`."""
        return self.elements()

    def full(self) -> torch.Tensor:
        """Return the whole tensor, a plain one in new memory. Every rank calls it."""
        if part_of(self) is not None and not ours(sys._getframe(1), ()):  # noqa: SLF001 - who asks
            return self._everywhere()
        if self.of is not None:
            root, view = self.of
            return view(root.full())
        self.looked_at("the whole")
        return self.home.gather(self.piece.to(self.device)).view(self.shape)

    def _everywhere(self) -> torch.Tensor:
        """Return the whole tensor; of a part, that of all axes."""
        if part_of(self) is None:
            return self.full()
        from roundelay.parallel.whole_parts import whole_of  # noqa: PLC0415 - needs this class

        return whole_of(self, "full")

    @property
    def lives(self) -> bool:
        """Whether somebody is told of what is written: it is part of the training."""
        return self.wrote is not nothing

    def looked_at(self, what: str) -> None:
        """Have ranks compare how they came by what is now computed of all their pieces."""
        if self.past[0]:
            self.home.note(f"{what} of a tensor, made of {self.home.name}, {self.past[0]:08x}")

    def lies_like(self, other: torch.Tensor) -> bool:
        """Tell whether another tensor is divided in the same places."""
        return (
            isinstance(other, Shard) and other.of is None
            and other.shape == self.shape and other.home.counts == self.home.counts
        )  # fmt: skip

    def own(self, other: torch.Tensor) -> torch.Tensor:
        """Return the elements of another tensor of this shape that go with those here."""
        if isinstance(other, Shard):
            if self.lies_like(other):
                return other.piece
            other = other.full()
        return self.home.cut(other.expand(self.shape))

    def fitting(self, other: torch.Tensor) -> torch.Tensor:
        """Return those elements, or one number for all."""
        if other.dim() == 0 and (self.dim() or not isinstance(other, Shard)):
            return other.full() if isinstance(other, Shard) else other
        return self.own(other)

    def beside(self, other: torch.Tensor) -> torch.Tensor:
        """Return what fits, on the device where the elements here are: they may lie on the host."""
        found, device = self.fitting(other), self.piece.device
        number = found.dim() == 0 and found.device.type == "cpu"  # which goes with any device
        return found if number else found.to(device)

    def made(self, piece: torch.Tensor, device: torch.device | None = None, past: int = 0) -> Shard:
        """Return another tensor of this shape that lies on the ranks as this one does."""
        mine = self.piece.dtype
        seen = self.dtype if mine != self.dtype and mine == piece.dtype else None
        return Shard(
            self.home, piece, self.shape, dtype=seen, device=device or self.device, past=[past]
        )

    def reshaped(self, shape: Sequence[int], elements: torch.Tensor | None = None) -> Shard:
        """Return the same elements in another shape."""
        return Shard(
            self.home, self.elements if elements is None else elements, shape, dtype=self.dtype
            if elements is None else None, device=self.device, kind=self.kind, wrote=self.wrote,
            past=self.past,
        )  # fmt: skip

    # ---- operations

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Hand everything to the dispatcher, but have whole tensors enter autograd's graph.

        There each rank computes with its own batch, and what flows back is summed up over ranks.
        """
        if (found := on_parts(func, args, kwargs)) is not NotImplemented:
            return found
        if any(issubclass(one, torch.nn.Parameter) and one is not PartParameter for one in types):
            return NotImplemented  # it is away, and knows what to do
        if torch.is_grad_enabled():
            from roundelay.training.shards.parameter import for_graph  # noqa: PLC0415 - as below

            whole = for_graph(func, args, kwargs or {})
            if whole is not None:
                return func(*whole[0], **whole[1])
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it loosely
        cls,
        func: Any,  # Any: torch's operators have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute one operation, on pieces or on the whole."""
        from roundelay.training.shards._operations import operate  # noqa: PLC0415 - needs this class

        return operate(func, tuple(args), dict(kwargs or {}))

    # ---- what Python asks for beside operations

    @property
    def data(self) -> torch.Tensor:  # torch's is an attribute
        """The same elements, apart from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise InvalidArgumentError(
                f"{self.told} is {self.dtype} of shape {tuple(self.shape)}, and can't become "
                f"{value.dtype} of shape {tuple(value.shape)}. Change shapes and dtypes before "
                f"prepare."
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole as an array that can't be written. Every rank calls it."""
        array = self._everywhere().detach().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001
        return np.array(self.numpy(), dtype=dtype) if copy else np.asarray(self.numpy(), dtype)

    def tolist(self) -> Any:
        """Return the whole as nested lists. Every rank calls it."""
        return self._everywhere().tolist()

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy that lies on the ranks alike; nothing is sent for it."""
        made: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("Pickling")

    def apply_(self, function: Callable[[Any], Any]) -> torch.Tensor:
        """Have a function of Python change every element. Every rank calls it."""
        return self.copy_(self.full().apply_(function))

    def map_(self, other: torch.Tensor, function: Callable[[Any, Any], Any]) -> torch.Tensor:
        """Do so with those of another tensor."""
        theirs = other.full() if isinstance(other, Shard) else other
        return self.copy_(self.full().map_(theirs, function))

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes contents to be shown
        home = self.home
        here = f"elements {home.start} to {home.stop}" if home.stop > home.start else "no element"
        return (
            f"<{self.kind} of {home.name} {tuple(self.shape)}, of which rank {home.rank} has "
            f"{here}>"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.dim() else repr(self)

    @property
    def told(self) -> str:
        """What to call it at the beginning of a message."""
        return f"The {self.kind} of {self.home.name}"

    def refuse(self, call: str) -> NoReturn:
        """Raise that a call needs what is not there."""
        raise InvalidArgumentError(
            f"{call} needs the memory of a whole tensor, but the {self.kind} of {self.home.name} "
            f"is divided between the ranks. {WAY_OUT}"
        )


#: What needs memory of the whole; torch would take what is not there for it.
MEMORY = {
    "__dlpack__", "_typed_storage", "const_data_ptr", "data_ptr", "map2_", "share_memory_",
    "storage", "storage_type", "untyped_storage",
}  # fmt: skip


def _refusing(call: str) -> Callable[..., NoReturn]:
    def refuse(self: Shard, *_: Any, **__: Any) -> NoReturn:  # arguments of no meaning
        self.refuse(call)

    return refuse


for _call in MEMORY:
    setattr(Shard, _call, _refusing(_call))


def _always(piece: torch.Tensor) -> Elements:
    return lambda: piece


def nothing(_: str) -> None:
    """Have nobody told."""
