"""What a rank writes of a checkpoint and takes back: stretches of parameters, with their state.

Each strategy says which stretches are whose. A checkpoint knows parameters by name and elements by
their place in the flattened parameter, so what was cut one way is read back cut another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from roundelay.training.optimizer.state_tree import Made, each_tensor, filled, slots

if TYPE_CHECKING:
    from roundelay.communicator import Communicator
    from roundelay.training._setup import Setup
    from roundelay.training.optimizer.joined import JoinedOptimizers

__all__ = [
    "Saved",
    "SavedPart",
    "by_element",
    "divided",
    "hand_out",
    "named",
    "placed",
    "restore_state",
    "restore_whole",
    "stretch",
    "taken",
]

#: State that is one number for a whole parameter, also where that has one element itself.
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Elements `start` to `stop` of one flattened parameter, and what the optimizer has on them.

    State is split like the parameter where it has as many elements (`elements`), or belongs to the
    parameter as a whole (`whole`); the latter is written by whoever has element 0.
    """

    name: str
    start: int
    stop: int
    values: torch.Tensor
    elements: Mapping[str, torch.Tensor] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)  # Any: what optimizers keep


class Saved(Protocol):
    """A checkpoint, as strategies read it."""

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat."""

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter."""


def by_element(key: object, value: object, tensor: torch.Tensor) -> bool:
    """Tell whether a piece of state has an element for each of the tensor's."""
    fits = isinstance(value, torch.Tensor) and value.shape == tensor.shape
    return fits and isinstance(key, str) and key not in NUMBERS


def taken(
    saved: Saved, name: str, start: int, stop: int, made: Made = torch.Tensor.view
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state on some elements, flat, and that of the whole parameter.

    Where containers of the latter have elements, `made` says what is put there.
    """
    elements, whole = saved.state(name, start, stop), saved.whole_state(name)
    inside = slots(whole)
    return (
        {key: element for key, element in elements.items() if key not in inside},
        filled(whole, elements, made),
    )


def stretch(
    name: str, tensor: torch.Tensor, state: Mapping[str, Any], start: int, stop: int, *, at: int = 0
) -> SavedPart:
    """Return elements `start` to `stop` of a parameter, which lie at `at` in this tensor.

    The state is what the optimizer has on the tensor.
    """
    inside = slice(at, at + stop - start)
    split = {key: value for key, value in state.items() if by_element(key, value, tensor)}
    whole = {key: value for key, value in state.items() if key not in split}
    return SavedPart(
        name,
        start,
        stop,
        tensor.detach().reshape(-1)[inside],
        {key: value.detach().reshape(-1)[inside] for key, value in split.items()},
        whole if start == 0 else {},
    )


def divided(setup: Setup, tensors: Mapping[str, torch.Tensor] | None = None) -> Iterator[SavedPart]:
    """Yield this rank's even share of what every rank has whole: everything, or these."""
    tensors = named(setup) if tensors is None else tensors
    experts = {name for name in tensors if setup.mesh and setup.mesh.axis_of(name) == "ep"}
    alike = {name: tensor for name, tensor in tensors.items() if name not in experts}
    yield from _share(setup, setup.comm, alike)
    if experts:
        apart = {name: tensors[name] for name in tensors if name in experts}
        yield from _share(setup, setup.same_experts, apart)


def _share(
    setup: Setup, comm: Communicator, tensors: Mapping[str, torch.Tensor]
) -> Iterator[SavedPart]:
    total = sum(tensor.numel() for tensor in tensors.values())
    size, rank = comm.size, comm.rank
    low, high = total * rank // size, total * (rank + 1) // size
    first = 0
    for name, tensor in tensors.items():
        last = first + tensor.numel()
        start, stop = max(first, low), min(last, high)
        # A parameter of no elements belongs to the first rank.
        state = setup.optimizer.state.get(tensor, {})
        if tensor.numel() == 0 and rank == 0:
            yield stretch(name, tensor, state, 0, 0)
        elif start < stop:
            yield stretch(name, tensor, state, start - first, stop - first, at=start - first)
        first = last


def named(setup: Setup) -> dict[str, torch.Tensor]:
    """Return what is written of each parameter: what the optimizer steps on, or a frozen one."""
    tensors: dict[str, torch.Tensor] = dict(setup.model.named_parameters())
    for parameter, stepped in zip(setup.parameters, setup.stepped, strict=True):
        tensors[parameter.name] = stepped
    return tensors


@torch.no_grad()
def restore_whole(setup: Setup, saved: Saved) -> None:
    """Read everything, where every rank has it whole."""
    for name, tensor in named(setup).items():
        tensor.copy_(saved.values(name, 0, tensor.numel()).view(tensor.shape))
    for parameter, tensor in zip(setup.parameters, setup.stepped, strict=True):
        restore_state(setup.optimizer, tensor, *taken(saved, parameter.name, 0, tensor.numel()))


def restore_state(
    optimizer: JoinedOptimizers,
    tensor: torch.Tensor,
    elements: Mapping[str, torch.Tensor],
    whole: Mapping[str, Any],
) -> None:
    """Give the optimizer the state that a checkpoint has on these elements, on this tensor."""
    group = next(
        group for group in optimizer.param_groups if any(one is tensor for one in group["params"])
    )
    on_device = bool(group.get("capturable") or group.get("fused"))
    found: dict[str, Any] = {
        key: placed(value, tensor).view(tensor.shape) for key, value in elements.items()
    }
    for key, value in whole.items():
        # Numbers stay on the CPU, as torch keeps them, unless its kernels want them there.
        moves = key not in NUMBERS or on_device
        found[key] = each_tensor(value, partial(_moved, tensor.device)) if moves else value
    if found:
        optimizer.state[tensor] = found
    else:
        optimizer.state.pop(tensor, None)


def _moved(device: torch.device, _: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device) if type(tensor) is torch.Tensor else tensor


def placed(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of elements of state on the device of a tensor, and in its dtype."""
    kind = tensor.dtype if value.is_floating_point() else value.dtype
    return value.to(tensor.device, kind, copy=True)


@torch.no_grad()
def hand_out(setup: Setup) -> None:
    """Round whole master weights into the model, if there are any."""
    if setup.masters is not None:
        for parameter, master in zip(setup.parameters, setup.masters, strict=True):
            parameter.tensor.copy_(master)
