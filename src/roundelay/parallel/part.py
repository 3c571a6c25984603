"""A parameter of which this rank has a part, along an axis of the mesh, as a tensor that knows it.

Its layer computes with the part. A norm or a mean that somebody else takes of it would be that of
the part, and nobody sees it. So whoever else asks gets what one device would compute: by element a
part again, and anything else from the whole, which is gathered for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.optim.optimizer as torch_optimizer

from roundelay.errors import InvalidArgumentError
from roundelay.parallel._cut import name_of
from roundelay.parallel._cut_dim import RESHAPES, VIEWS, tells_nothing

if TYPE_CHECKING:
    from roundelay.parallel.sharding import Sharding

__all__ = [
    "PartParameter",
    "PartTensor",
    "WholeView",
    "as_they_lie",
    "mapped",
    "marked",
    "on_parts",
    "ours",
    "part_of",
    "plain",
]

#: What tells something of a part, or hands out what does, though it gives none of its numbers.
TOLD = frozenset({"numel", "nelement", "register_hook"})
SETS = frozenset({"grad", "data"})
#: What says nothing of elements, and is done where they lie.
STAYS = frozenset(
    {"requires_grad_", "share_memory_", "__format__", "__deepcopy__", "__reduce_ex__"}
)
#: Torch's own that know that they work by element, or do not look at elements: optimizers and
#: what modules do with parameters, but for calling the layers.
KNOW = ("torch.optim.", "torch.amp.grad_scaler", "torch.nn.modules.module")
OTHERS = ("torch.optim.lbfgs", "torch.optim._muon", "torch.optim._adafactor",
             "torch.optim.swa_utils")  # fmt: skip
CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "inner"})
WAY_OUT = (
    "rd.local(x) is this rank's part as an ordinary tensor, in code that knows of the other ranks; "
    "rd.whole_tensors(model) has all of it."
)


MAPPED = (
    "torch.vmap goes over tensors of its own, which know nothing of other ranks, and this one of "
    "{shape} is divided between them. "
)


def mapped(func: Any) -> bool:
    """Say whether vmap is about to go over a tensor: the first thing it asks is for its dims."""
    if func is not torch.Tensor.dim:
        return False
    caller = sys._getframe(2).f_globals.get("__name__")  # noqa: SLF001 - torch shows no more
    return caller == "torch._functorch.vmap"


class PartParameter(torch.nn.Parameter):
    """A parameter that is divided: its layer sees this rank's part, others compute as the whole."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch: on the part for its layer, and for others as on the whole."""
        if mapped(func):
            raise InvalidArgumentError(f"{MAPPED.format(shape=whole_shape(args[0]))}{WAY_OUT}")
        if kwargs is None and len(args) == 1 and not _tells(func):  # most are, and are to be quick
            return _disabled(func, types, args, {})
        return _answer(func, types, args, kwargs)

    def __hash__(self) -> int:  # torch's asks who else has one
        return id(self)


class PartTensor(torch.Tensor):
    """What is computed by element from parameters that are divided: a part of it, likewise."""

    sharding: Sharding

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: likewise
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do likewise."""
        if mapped(func):
            raise InvalidArgumentError(f"{MAPPED.format(shape=whole_shape(args[0]))}{WAY_OUT}")
        return _answer(func, types, args, kwargs)

    def __hash__(self) -> int:  # likewise
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a part again; nothing is sent for it."""
        if id(self) not in memo:
            copied = marked(plain(self).detach().clone(), self.sharding)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        made: torch.Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: what is kept would be one rank's part, and not say so."""
        raise InvalidArgumentError(
            f"Pickling or copying needs a whole tensor, and this one is a part of "
            f"{whole_shape(self)} on {ranks_of(self.sharding)}. {WAY_OUT}"
        )


class WholeView(torch.Tensor):
    """A view of what was gathered: it is read as any other, and what is written would be lost."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: likewise
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse what writes into it."""
        name = name_of(func)
        if writes(name) and args and type(args[0]) is cls:
            raise InvalidArgumentError(
                f"{name}() writes into a view of a parameter that ranks have parts of. The view is "
                f"of a copy, which was gathered to be read. Write into the parameter itself: "
                f"p[0] = 0 and p.mul_(mask) do so on the ranks that have the elements."
            )
        if any(one not in (cls, *ORDINARY) for one in types):
            return NotImplemented
        made = _disabled(func, types, tuple(args), dict(kwargs or {}))
        return viewed(made) if name.strip("_") in VIEWS | RESHAPES | {"detach", "data"} else made


_disabled: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - torch's way to pass
ORDINARY = torch.Tensor, torch.nn.Parameter
PARTS_ONLY = PartParameter, PartTensor
PARTS = frozenset({PartParameter, PartTensor, WholeView, *ORDINARY})

# Torch steps on many tensors at once if it knows their classes; these lie as any other.
_known = vars(torch_optimizer).get("_foreach_supported_types", [])
_known += [one for one in (PartParameter, PartTensor) if one not in _known]


def _answer(
    func: Any, types: Iterable[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    if torch.compiler.is_compiling():
        if func in TRACED:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return func(*args, **(kwargs or {}))
        return _aside(func, types, args, kwargs)
    return _asked(func, types, args, kwargs)


def _asked(
    func: Any, types: Iterable[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    if not _tells(func) or ours(sys._getframe(3), args):  # noqa: SLF001 - torch does not say who asks
        for one in types:
            if one not in PARTS:
                return NotImplemented
        return _disabled(func, types, args, kwargs or {})
    if _strange(types):
        return NotImplemented
    from roundelay.parallel.part_rules import computed  # noqa: PLC0415 - needs these classes

    return computed(func, tuple(args), dict(kwargs or {}))


#: What layers compute with parameters; where torch.compile traces it, it stays in the graph.
TRACED = frozenset({torch.nn.functional.linear, torch.nn.functional.embedding})
#: Anything else is asked for outside of what torch.compile traces, where one sees who asks.
_aside: Any = torch._disable_dynamo(_asked)  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own


def on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Compute what is asked of shards of parts, if others ask than we; else NotImplemented."""
    listed = [*args, *(kwargs or {}).values()]
    flat = [one for each in listed for one in (each if type(each) in (list, tuple) else (each,))]
    if all(part_of(one) is None for one in flat) or not _tells(func):
        return NotImplemented
    if ours(sys._getframe(2), args):  # noqa: SLF001 - likewise
        return NotImplemented
    from roundelay.parallel.part_rules import computed  # noqa: PLC0415 - likewise

    return computed(func, tuple(args), dict(kwargs or {}))


@cache
def _tells(func: Any) -> bool:
    """Say whether a function tells anything of elements that a part has and others have not."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        own = getattr(func.__self__, "__name__", "")
        if own in SETS:
            return True
        return name == "__get__" and not tells_nothing(func)
    return name in TOLD or not (name in STAYS or tells_nothing(func))


def _strange(types: Iterable[type]) -> bool:
    """Say whether a tensor is there that knows better: what a cut layer gives, or torch's own."""
    return any(
        one not in ORDINARY
        and (not one.__module__.startswith("roundelay.") or one.__name__ == "CutTensor")
        for one in types
    )


def ours(frame: FrameType | None, args: Sequence[Any]) -> bool:
    """Say whether a layer of a parameter, an optimizer of torch's, or we ask for it."""
    while frame is not None and frame.f_globals is HERE:
        frame = frame.f_back
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        known = _known_as(name)
        if known == OURS or (known == KNOWS and code.co_name not in CALLS):
            return True
        if code in LAYERS and type(args[0]) not in PARTS_ONLY:
            return True
        if code.co_name == "forward" and _of_layer(frame, args):
            return True
        if known == USERS:
            return _by_hand(frame, args)
        frame = frame.f_back
    return True


OURS, KNOWS, TORCHS, USERS = range(4)
HERE = globals()
#: Layers of torch's that compute with nothing but what they have themselves, and their input.
LAYERS = frozenset({torch.nn.Linear.forward.__code__, torch.nn.Embedding.forward.__code__})


@cache
def _known_as(module: str) -> int:
    """Say whose code a module is, by its name."""
    if module.startswith("roundelay."):
        return OURS
    if not module.startswith("torch."):
        return USERS
    return KNOWS if module.startswith(KNOW) and module not in OTHERS else TORCHS


def _owner(frame: FrameType) -> torch.nn.Module | None:
    """Return the module whose method runs."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return owner if isinstance(owner, torch.nn.Module) else None


def _of_layer(frame: FrameType, args: Sequence[Any]) -> bool:
    """Say whether a layer computes with what it has itself."""
    owner = _owner(frame)
    if owner is None:
        return False
    if "tensor_plan" in vars(owner):
        return True
    own = {id(one) for one in vars(owner)["_parameters"].values() if one is not None}
    parts = [one for one in args if part_of(one) is not None]
    return bool(parts) and all(id(one) in own for one in parts)


def _by_hand(frame: FrameType, args: Sequence[Any]) -> bool:
    """Say whether a module computes with what somebody has divided who wrote the module, too."""
    parts = [one for one in args if (cut := part_of(one)) is not None and cut.by == "hand"]
    owner = _owner(frame) if parts else None
    if owner is None:
        return False
    return any(one is each for one in owner.parameters() for each in parts)


def part_of(x: Any) -> Sharding | None:
    """Return how what a tensor is a part of is divided; None for any other thing."""
    if not isinstance(x, torch.Tensor):
        return None
    found: Sharding | None = vars(x).get("sharding")
    return found if found is not None and found.comm.size > 1 else None


def marked(x: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Have an ordinary tensor know that it is a part."""
    if type(x) is torch.Tensor:
        x.__class__ = PartTensor
        vars(x)["sharding"] = sharding
    return x


def viewed(made: Any) -> Any:
    """Have views of what was gathered refuse to be written into."""
    if type(made) in (list, tuple):
        return type(made)(map(viewed, made))
    if type(made) is torch.Tensor:
        made.__class__ = WholeView
    return made


@contextmanager
def as_they_lie(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have parts be ordinary tensors for a while, for code that works by element, at its speed."""
    parts = [(one, type(one)) for one in tensors if type(one) in PARTS_ONLY]
    for one, kind in parts:
        one.__class__ = torch.nn.Parameter if kind is PartParameter else torch.Tensor
    try:
        yield
    finally:
        for one, kind in parts:
            one.__class__ = kind


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the same elements, this rank's part, as an ordinary tensor."""
    if not isinstance(x, (PartParameter, PartTensor)):
        return x
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
        return x.as_subclass(torch.Tensor)


def whole_shape(x: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of what a tensor is a part of."""
    sharding = part_of(x)
    return tuple(x.shape) if sharding is None else sharding.whole_shape(x.shape)


def ranks_of(sharding: Sharding) -> str:
    """Say where we are."""
    return f"rank {sharding.comm.rank} of {sharding.comm.size} along {sharding.axis}"


def writes(name: str) -> bool:
    """Say whether a function changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i")
            and name not in ("__invert__", "__index__", "__int__", "__iter__")
        )
    return name.endswith("_")
