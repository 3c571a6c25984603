"""A tensor that is divided between the ranks, and behaves as the whole one.

Every rank has a stretch of its elements. What works element by element is done on those. What makes
one number of all elements is computed by all ranks together. Anything else is computed from the
whole tensor, which is gathered for it, alike on every rank. What is written goes to where elements
lie, also through views. So all ranks must come by the same operations, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._shard_home import Home

__all__ = ["WAY_OUT", "Shard", "View"]

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
    wrote: Callable[[], None]  # is told when elements were written
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
        wrote: Callable[[], None] | None = None,
        of: tuple[Shard, View] | None = None,
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
            dtype=dtype,
            device=device or home.device,
            requires_grad=requires_grad,
        )
        made.home, made.kind, made.of = home, kind, of
        made.elements, made.wrote = elements, wrote or _nothing
        return made

    # ---- the elements

    @property
    def piece(self) -> torch.Tensor:
        """The elements that are here, flat: those from `home.start` to `home.stop`."""
        return self.elements()

    def full(self) -> torch.Tensor:
        """Return the whole tensor, a plain one in new memory. Every rank calls it."""
        if self.of is not None:
            root, view = self.of
            return view(root.full())
        return self.home.gather(self.piece.to(self.device)).view(self.shape)

    def own(self, other: torch.Tensor) -> torch.Tensor:
        """Return the elements of another tensor of this shape that go with those here."""
        if isinstance(other, Shard):
            alike = other.shape == self.shape and other.home.counts == self.home.counts
            if alike and other.of is None:
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

    def made(self, piece: torch.Tensor, device: torch.device | None = None) -> Shard:
        """Return another tensor of this shape that lies on the ranks as this one does."""
        mine = self.piece.dtype
        seen = self.dtype if mine != self.dtype and mine == piece.dtype else None
        return Shard(self.home, piece, self.shape, dtype=seen, device=device or self.device)

    def reshaped(self, shape: Sequence[int], elements: torch.Tensor | None = None) -> Shard:
        """Return the same elements in another shape."""
        return Shard(
            self.home, self.elements if elements is None else elements, shape, dtype=self.dtype
            if elements is None else None, device=self.device, kind=self.kind, wrote=self.wrote,
        )  # fmt: skip

    # ---- operations

    # Everything goes to the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it loosely
        cls,
        func: Any,  # Any: torch's operators have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute one operation, on pieces or on the whole."""
        from roundelay.training._shard_operations import operate  # noqa: PLC0415 - needs this class

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
        array = self.full().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001
        return np.array(self.numpy(), dtype=dtype) if copy else np.asarray(self.numpy(), dtype)

    def tolist(self) -> Any:
        """Return the whole as nested lists. Every rank calls it."""
        return self.full().tolist()

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy that lies on the ranks alike; nothing is sent for it."""
        made: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("Pickling")

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory of the whole."""
        self.refuse("data_ptr")

    def untyped_storage(self) -> NoReturn:
        """Refuse likewise."""
        self.refuse("untyped_storage")

    def share_memory_(self) -> NoReturn:
        """Refuse likewise."""
        self.refuse("share_memory_")

    def __dlpack__(self, **_: Any) -> NoReturn:  # options of no meaning
        self.refuse("__dlpack__")

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


def _always(piece: torch.Tensor) -> Elements:
    return lambda: piece


def _nothing() -> None:
    """Have nobody told."""
