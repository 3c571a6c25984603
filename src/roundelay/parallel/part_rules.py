"""What is computed of parameters that ranks have parts of, as one device would compute it.

By element each rank computes on its part. Anything else is computed from the whole, which is
gathered on every rank. Each takes its own part of what is written, and of gradients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel._callers import by_fan, makes_another
from roundelay.parallel._cut import name_of
from roundelay.parallel._cut_dim import ELEMENTWISE, ENDS, RESHAPES, VIEWS, words
from roundelay.parallel.expert.direct_gradients import count_whole
from roundelay.parallel.part import (
    WAY_OUT,
    PartParameter,
    PartTensor,
    as_they_lie,
    marked,
    part_of,
    plain,
    ranks_of,
    viewed,
    whole_shape,
    writes,
)
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.whole_parts import entered, shared, whole_of

__all__ = ["computed"]

Given = dict[str, Any]
RANDOM = words("""
    normal uniform random bernoulli cauchy exponential geometric log_normal dropout alpha_dropout
    feature_alpha_dropout rrelu rand_like randn_like randint_like multinomial poisson
""")
DIFFERENTIATE = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward


def computed(func: Any, args: tuple[Any, ...], options: Given) -> Any:  # Any: torch's
    """Compute what somebody asks who does not know of the parts."""
    name, kind = name_of(func), getattr(func, "__name__", "")
    if kind in ("__get__", "__set__"):
        name = func.__self__.__name__
        if kind == "__set__":
            if name == "data" and vars(args[0]).get("lent"):
                raise InvalidArgumentError(
                    f"p.grad.data = … on {_where(args[0])} would change what p.grad has given, and "
                    f"not the gradient. Take p.grad = …, or p.grad.copy_(…)."
                )
            return func(args[0], _fitting(name, *args))
    if name == "detach" and isinstance(args[0], PartParameter) and makes_another():
        raise InvalidArgumentError(
            f"nn.Parameter(p) on {_where(args[0])} would not know that it is a part. Take "
            f"nn.Parameter(p.data), copy.deepcopy(p), or do so before the model is divided."
        )
    if name in ("normal_", "uniform_") and (fan := by_fan()):
        raise InvalidArgumentError(
            f"torch.nn.init.{fan} on {_where(args[0])} takes the fan from the part's shape. "
            f"Initialize before the model is divided, or take normal_ or uniform_ with the numbers "
            f"of the whole."
        )
    special = SPECIAL.get(func if func in DIFFERENTIATE else name)
    if special is not None:
        return special(func, args, options)
    if name.startswith("_foreach_"):
        return _on_lists(func, name, args, options)
    return _one(func, name, args, options)


def _one(func: Any, name: str, args: tuple[Any, ...], options: Given) -> Any:
    """Compute a function of one tensor, or of several together."""
    simple = name.strip("_").removeprefix("special_")
    tensors = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
    if part_of(options.get("out")) is not None:
        raise InvalidArgumentError(
            f"{name}(out=…) on {_where(options['out'])} would write a whole tensor into a part. "
            f"Take p.copy_({name}(…)), of which every rank keeps its part."
        )
    drawn = simple in RANDOM
    drawn = drawn or getattr(func, "__module__", "") == "torch.nn.init"
    by_element = simple in ELEMENTWISE and name not in ENDS and not drawn
    by_element = by_element and not (simple == "where" and len(tensors) == 1)
    if simple in ("to", "type_as") and part_of(args[0]) is None:
        return func(args[0], *map(_undivided, args[1:]), **options)  # takes a dtype only
    if by_element:
        if writes(name) and part_of(args[0]) is not None:
            args, options = _beside(name, args[0], (args, options))
            return func(*args, **options)
        if (sharding := _alike(tensors)) is not None:
            return _on_parts(func, args, options, sharding)
        _broadcast(name, tensors)
    return _on_whole(func, name, args, options, drawn=drawn)


# ---- by element


def _alike(tensors: Sequence[torch.Tensor]) -> Sharding | None:
    """Return how all are divided, if what is computed of them by element is divided alike."""
    lead = next(one for one in tensors if part_of(one) is not None)
    sharding = part_of(lead)
    if sharding is None or not all(_goes_with(one, lead, sharding) for one in tensors):
        return None
    return sharding


def _goes_with(one: torch.Tensor, lead: torch.Tensor, sharding: Sharding) -> bool:
    own, dim = part_of(one), sharding.dim % lead.dim()
    if own is not None:
        return own == sharding and one.shape == lead.shape
    if one.shape == lead.shape:  # a copy of the part, or a mask
        return True
    if one.dim() > lead.dim() or any(
        length not in (1, there)
        for length, there in zip(one.shape[::-1], lead.shape[::-1], strict=False)
    ):
        return False
    at = dim - lead.dim()
    return one.dim() < -at or one.size(at) == 1


def _on_parts(func: Any, args: tuple[Any, ...], options: Given, sharding: Sharding) -> Any:
    given = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
    shape = next(one.shape for one in given if part_of(one) is not None)
    lies = name_of(func) in ("data", "detach")  # where it is, to be written there

    def enter(one: torch.Tensor) -> torch.Tensor:
        if lies:
            return one
        return shared(one, sharding) if one.shape != shape else entered(one)

    made = func(*_map(enter, args), **_map(enter, options))

    def mark(one: torch.Tensor) -> torch.Tensor:
        return marked(one, sharding) if one.shape == shape else one

    return tree_map_only(torch.Tensor, mark, made)


def _beside(name: str, target: torch.Tensor, given: Any) -> Any:
    """Return what goes with a part that is written: of whole tensors, this rank's part."""
    sharding: Sharding = vars(target)["sharding"]

    def fit(one: torch.Tensor) -> torch.Tensor:
        if one is target:
            return one
        if _goes_with(one, target, sharding):
            return entered(one) if one.shape == target.shape else shared(one, sharding)
        whole = whole_of(one, name) if part_of(one) is not None else one
        try:
            return sharding.local(whole.expand(whole_shape(target)))
        except RuntimeError as error:
            raise InvalidArgumentError(_misfits(name, target, one)) from error

    return _map(fit, given)


def _broadcast(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what fits neither the part nor the whole, before anything is gathered."""
    lead = next(one for one in tensors if part_of(one) is not None)
    for one in tensors:
        try:
            torch.broadcast_shapes(whole_shape(lead), whole_shape(one))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise InvalidArgumentError(_misfits(name, lead, one)) from error


# ---- on the whole


def _on_whole(func: Any, name: str, args: tuple[Any, ...], options: Given, *, drawn: bool) -> Any:
    """Compute from the whole, on every rank alike; what is written, every rank has its part of."""
    first = args[0] if args else next(iter(options.values()))  # torch.nn.init names it
    target = first if writes(name) and part_of(first) is not None else None
    lead = next(one for one in tree_leaves((args, options)) if part_of(one) is not None)
    sharding: Sharding = vars(lead)["sharding"]
    opened: dict[int, torch.Tensor] = {}

    def take(one: torch.Tensor) -> torch.Tensor:
        if id(one) not in opened:
            opened[id(one)] = whole_of(one, name)
            if one is target:
                opened[id(one)] = opened[id(one)].clone()
        return opened[id(one)]

    if func is torch.Tensor.__iter__:
        return iter(viewed(take(first).unbind(0)))
    made = func(*_map(take, args), **_map(take, options))
    if drawn:
        _compare(name, sharding, opened[id(target)] if target is not None else made)
    if target is not None:
        _put_back(func, name, target, opened[id(target)])
        return target
    if drawn and isinstance(made, torch.Tensor) and made.shape == whole_shape(lead):
        return marked(sharding.local(made), sharding)
    if name in ("numpy", "__array__"):
        made.flags.writeable = False
    return viewed(made) if name.strip("_") in VIEWS | RESHAPES else made


def _put_back(func: Any, name: str, target: torch.Tensor, whole: torch.Tensor) -> None:
    sharding = part_of(target)
    if sharding is None or tuple(whole.shape) != whole_shape(target):
        raise InvalidArgumentError(
            f"{name}() on {_where(target)} would give it another shape. Change shapes before the "
            f"model is divided, or take the function without the underscore."
        )
    init = getattr(func, "__module__", "") == "torch.nn.init"
    with torch.set_grad_enabled(torch.is_grad_enabled() and not init):
        target.copy_(sharding.local(whole))


def _compare(name: str, sharding: Sharding, drawn: Any) -> None:
    """Refuse random numbers that ranks have drawn differently for the whole."""
    if not isinstance(drawn, torch.Tensor):
        return
    seen = drawn.detach().contiguous().cpu().view(torch.uint8).numpy()
    every = sharding.comm.all_gather(torch.tensor([zlib.crc32(seen.tobytes())]))
    if len({*every.flatten().tolist()}) > 1:
        raise CollectiveMismatch(
            f"{name}() of a parameter that ranks along {sharding.axis} have parts of draws for the "
            f"whole, as one device does, and they have drawn other numbers. Seed all of them "
            f"alike, or give a generator of your own, or initialize before the model is divided."
        )


# ---- what leads to gradients


def _numel(_: Any, args: tuple[Any, ...], __: Given) -> int:
    return math.prod(whole_shape(args[0]))


def _gradient(func: Any, args: tuple[Any, ...], _: Given) -> Any:
    """Return a gradient as a part, in the memory where it lies."""
    parameter = args[0]
    grad, sharding = func(*args), part_of(parameter)
    if type(grad) is not torch.Tensor or sharding is None or grad.shape != parameter.shape:
        return grad
    seen = grad.as_subclass(PartTensor)
    vars(seen).update(sharding=sharding, lent=True)
    return seen


def _fitting(name: str, tensor: torch.Tensor, value: Any) -> Any:
    """Return what becomes the data or the gradient of a part: a part, also of a whole tensor."""
    sharding = part_of(tensor)
    if not isinstance(value, torch.Tensor) or sharding is None or hasattr(value, "home"):
        return value
    if value.shape == tensor.shape and part_of(value) in (None, sharding):
        return plain(value)
    value = whole_of(value, name)
    if tuple(value.shape) != whole_shape(tensor):
        raise InvalidArgumentError(_misfits(f".{name} = …", tensor, value))
    return sharding.local(value)


def _hook(func: Any, args: tuple[Any, ...], options: Given) -> Any:
    """Register a hook that gets a gradient as a part."""
    tensor = args[0]
    hook = args[1] if len(args) > 1 else options["hook"]
    sharding: Sharding = vars(tensor)["sharding"]

    times = _times(tensor)

    def hooked(grad: torch.Tensor) -> Any:
        seen = (grad / times if times > 1 else grad).as_subclass(PartTensor)
        vars(seen)["sharding"] = sharding
        found = hook(seen)
        if not isinstance(found, torch.Tensor):
            return found
        fitting = _fitting("grad", tensor, found)
        return fitting * times if times > 1 else fitting

    return func(tensor, hooked)


def _differentiated(func: Any, args: tuple[Any, ...], options: Given) -> Any:
    """Go backward with ordinary parameters; gradients that are handed out are parts."""
    with as_they_lie(one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)):
        made = func(*args, **options)
    if func is not torch.autograd.grad:
        return made
    inputs = options.get("inputs", args[1] if len(args) > 1 else ())
    asked = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    found = []
    for one, grad in zip(asked, made, strict=True):
        sharding = part_of(one)
        divided = sharding is not None and isinstance(grad, torch.Tensor)
        found.append(marked(grad / _times(one), sharding) if divided else grad)  # type: ignore[arg-type]
    return tuple(found)


def _times(x: torch.Tensor) -> int:
    """Return by what gradients of an expert are multiplied, to be divided by it at last."""
    sharding = part_of(x)
    if sharding is None or sharding.by != "experts" or not isinstance(x, torch.nn.Parameter):
        return 1
    if not hasattr(x, "home"):
        count_whole(x)
    return sharding.comm.size


SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], Given], Any]] = {
    "numel": _numel,
    "nelement": _numel,
    "grad": _gradient,
    "register_hook": _hook,
    **dict.fromkeys(DIFFERENTIATE, _differentiated),
}


# ---- lists


def _on_lists(func: Any, name: str, args: tuple[Any, ...], options: Given) -> Any:
    """Compute a function of lists of tensors: one after the other, each as by itself."""
    single = name.removeprefix("_foreach_")
    if single == "norm":
        return func(*_map(lambda one: whole_of(one, name), args), **options)
    own = getattr(torch.Tensor, single, None)
    if own is None:
        raise InvalidArgumentError(
            f"{name}() on {_where(next(one for one in tree_leaves(args) if part_of(one)))} is not "
            f"known. Call the function for each tensor by itself. {WAY_OUT}"
        )
    lists = [one for one in args if type(one) in (list, tuple)]
    found = []
    for at in range(len(lists[0])):
        mine = tuple(one[at] if type(one) in (list, tuple) else one for one in args)
        if single.startswith("addc") and len(mine) > 3:  # noqa: PLR2004 - value= has no name there
            mine, options = mine[:3], {**options, "value": mine[3]}
        ask = any(part_of(one) is not None for one in mine)
        found.append(_one(own, single, mine, options) if ask else own(*mine, **options))
    return None if writes(single) else found


# ---- words


def _map(change: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    return tree_map_only(torch.Tensor, change, given)


def _undivided(one: Any) -> Any:
    return torch.empty(0, dtype=one.dtype, device=one.device) if part_of(one) is not None else one


def _where(one: torch.Tensor) -> str:
    """Say what a tensor is a part of, and on which rank."""
    sharding = part_of(one)
    if sharding is None:
        return f"a tensor of shape {tuple(one.shape)}"
    return f"{ranks_of(sharding)}, a part {tuple(one.shape)} of {whole_shape(one)},"


def _misfits(name: str, lead: torch.Tensor, one: torch.Tensor) -> str:
    return (
        f"{name}() on {_where(lead)} does not go with {_where(one)}. Beside a part stands a "
        f"number, another part that is divided alike, or a tensor with the shape of the part or "
        f"one that goes with the whole. {WAY_OUT}"
    )
