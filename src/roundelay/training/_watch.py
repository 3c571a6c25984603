"""What goes through a model, module by module: on one device, and on a rank that has a share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.parallel.cut_tensor import unmarked
from roundelay.parallel.functions import counts_of
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import sharding_of
from roundelay.training._mesh_ranks import rows_of
from roundelay.training._refused_grad import RefusedGrad
from roundelay.training.shards.shard import Shard


class Watch:
    """The first output of every module since it was last cleared, in the order of the calls.

    Of a pipeline's modules that of every micro-batch, one below the other.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._outputs: dict[str, dict[int, torch.Tensor]] = {}
        self._hooks: list[Any] = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules()
            if name
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def see(_: torch.nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                number = getattr(self._model, "micro_batch", 0)
                mine = unmarked(output).detach().clone()
                self._outputs.setdefault(name, {}).setdefault(number, mine)

        return see

    def take(self) -> dict[str, torch.Tensor]:
        """Return them, and begin anew."""
        found, self._outputs = self._outputs, {}
        return {
            name: torch.cat([each[number] for number in sorted(each)]) if len(each) > 1 else each[0]
            for name, each in found.items()
            if len(each) == 1 or all(one.dim() for one in each.values())
        }

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()


def share_of(mesh: Mesh, tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's rows of a tensor, and along cp its part of the second dim, the sequence."""
    rows = rows_of(mesh)
    mine = tensor.tensor_split(rows.size)[rows.rank]
    if mesh.size("cp") > 1 and mine.dim() > 1:
        mine = mine.tensor_split(mesh.size("cp"), 1)[mesh.place["cp"]]
    return mine


def local_part(
    module: torch.nn.Module | None, mesh: Mesh, whole: torch.Tensor, like: torch.Tensor, rows: int
) -> torch.Tensor | None:
    """Return what a rank should have of a whole output, of which it has one like this.

    None where that can't be told: the output has other dims, or is cut in a way of its own.
    """
    if whole.dim() and whole.size(0) == rows:
        whole = share_of(mesh, whole)
    if whole.dim() != like.dim():
        return None
    dims = [dim for dim in range(whole.dim()) if whole.size(dim) != like.size(dim)]
    if not dims:
        return whole
    if len(dims) > 1 or "tp" not in mesh:
        return None
    dim = dims[0]
    spans = _spans(module, mesh, dim, whole)
    if sum(stop - start for start, stop in spans) != like.size(dim):
        return None
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in spans], dim)


def _spans(
    module: torch.nn.Module | None, mesh: Mesh, dim: int, whole: torch.Tensor
) -> Sequence[tuple[int, int]]:
    """Return what a rank along tp has of a dim: features as the weights say, or an even share."""
    weight = None if module is None else getattr(module, "weight", None)
    sharding = None if weight is None else sharding_of(weight)
    length = whole.size(dim)
    if sharding is not None and sharding.dim == 0 and dim == whole.dim() - 1:
        return sharding.pieces[sharding.comm.rank] if sum(sharding.counts) == length else []
    counts = counts_of(length, mesh.size("tp"))
    first = sum(counts[: mesh.place["tp"]])
    return [(first, first + counts[mesh.place["tp"]])]


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients that can be looked at, last first. Every rank calls it."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in reversed([*model.named_parameters()]):
        grad = parameter.grad
        if isinstance(grad, Shard):
            grad = grad.full()
        if grad is not None and not isinstance(grad, RefusedGrad):
            found[name] = grad.detach().clone()
    return found
