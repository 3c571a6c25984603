"""`rd.apply_plan`: cut the layers of an ordinary model between ranks, by patterns of names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roundelay.arguments import index_of, shown
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import Sharding, shard_parameter, sharding_of, take_whole
from roundelay.parallel.staging import staging_of
from roundelay.parallel.tensor._first_pass import look_at_first_pass
from roundelay.parallel.tensor._layer import LayerPlan
from roundelay.parallel.tensor._match import layers_of, problems_of, words_for
from roundelay.parallel.tensor.axis import TensorAxis
from roundelay.parallel.tensor.embedding import Embedding
from roundelay.parallel.tensor.plans import plans
from roundelay.parallel.tensor.random_numbers import RandomNumbers
from roundelay.parallel.tensor.region import Split

__all__ = ["apply_plan"]

AXIS = "tp"
Cuts = list[tuple[LayerPlan, dict[str, Sharding]]]


def apply_plan(
    model: nn.Module,
    plan: str | Mapping[str, str],
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
) -> None:
    """Cut a model's layers between the ranks of `mesh["tp"]`, in place.

    A plan maps patterns of module names to words (`{"*.up": "column", "*.down": "row", …}`), or is
    the name of one that ships. Modules and parameters stay the same objects with the same names;
    each keeps its part. Values are the first rank's. All ranks call it, and all is checked before
    anything changes.
    """
    if not isinstance(mesh, Mesh):
        raise InvalidArgumentError(f"apply_plan needs a mesh: rd.Mesh(tp=2, …), not {shown(mesh)}.")
    problem, words, cuts = "", "", Cuts()
    try:
        read = read_plan(plan)
        axis = _axis_of(model, mesh, sequence_parallel=sequence_parallel, dim=sequence_dim)
        cuts = _checked(model, read, axis)
        words = f"{dict(read)}, sequence_parallel={axis.dim}"
    except InvalidArgumentError as error:
        problem = str(error)
    _agree(mesh, problem, words, model)
    _share(model, mesh)
    axis.numbers = RandomNumbers(axis.comm)
    done: set[int] = set()
    for layer, shardings in cuts:
        for name, sharding in shardings.items():
            parameter = layer.place.module.get_parameter(name)
            if id(parameter) not in done:  # one that is tied is cut once
                done.add(id(parameter))
                shard_parameter(parameter, sharding)
    for layer, shardings in cuts:
        layer.apply(shardings)
        if shardings:
            hooked: Any = layer.place.module  # Any: torch's is not typed
            hooked.register_load_state_dict_pre_hook(take_whole)
    look_at_first_pass(model, axis)


def read_plan(plan: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return the patterns and words of a plan, or of one that ships by a name.

    >>> read_plan("llama")["*.mlp.down_proj"]
    'row'
    """
    if isinstance(plan, str):
        return plans.load(plan)
    keys: object = plan
    if not isinstance(keys, Mapping) or not all(isinstance(key, str) for key in keys):
        raise InvalidArgumentError(
            f"A plan maps patterns of names to words, or is one of {', '.join(plans.names())}; "
            f"not {shown(plan)}."
        )
    return plan


def _axis_of(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, dim: int) -> TensorAxis:
    """Return the ranks that share layers."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"apply_plan needs a model of torch, not {shown(model)}.")
    if AXIS not in mesh:
        axes = ", ".join(f"{name}={length}" for name, length in mesh.axes.items())
        raise InvalidArgumentError(
            f"A plan cuts layers along the axis {AXIS}, and the mesh has {axes}: "
            f"rd.Mesh({axes}, {AXIS}=…, comm=comm)."
        )
    if index_of(dim) not in (0, 1):
        raise InvalidArgumentError(
            f"sequence_dim is 1 for activations of batch, sequence, features, and 0 for sequence, "
            f"batch, features; not {shown(dim)}."
        )
    return TensorAxis(mesh[AXIS], AXIS, dim if sequence_parallel else None)


def _checked(model: nn.Module, plan: Mapping[str, str], axis: TensorAxis) -> Cuts:
    """Return how every layer is cut, or refuse all that can't be, at once."""
    staging = staging_of(model)  # what is not in this stage of a pipeline is in another
    everyone = model.named_modules(remove_duplicate=False)
    names = [name for name, _ in everyone] if staging is None else staging.modules
    problems = problems_of(model, plan, names)
    layers = layers_of(model, plan, axis)
    begins = {name for name, said in words_for(names, plan).items() if _begins(*said)}
    axis.staged = staging is not None
    axis.begun_elsewhere = axis.staged and begins.isdisjoint(dict(model.named_modules()))
    cuts: Cuts = []
    for layer in layers:
        try:
            cuts.append((layer, layer.cuts()))
        except InvalidArgumentError as error:
            problems.append(str(error))
    problems += _tied(model, cuts)
    if axis.dim is not None and not begins:
        problems.append(
            "sequence_parallel=True needs a place at which the sequence is divided: an "
            "'embedding' that is not 'whole', or 'split' for the first block."
        )
    if problems:
        lines = "\n  ".join(problems)
        raise InvalidArgumentError(f"The plan does not fit this {type(model).__name__}:\n  {lines}")
    return cuts


def _begins(kind: type[LayerPlan], _: str, words: frozenset[str]) -> bool:
    return kind is Split or (kind is Embedding and "whole" not in words)


def _tied(model: nn.Module, cuts: Cuts) -> list[str]:
    """Return which parameters the plan would cut in several ways, or a second time."""
    owners: dict[int, list[str]] = {}
    for label, module in model.named_modules():  # once each, whatever names one has
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{label}.{name}".lstrip("."))
    ways: dict[str, Sharding] = {
        f"{layer.place.name}.{name}".lstrip("."): sharding
        for layer, shardings in cuts
        for name, sharding in shardings.items()
    }
    problems = []
    for names in owners.values():
        if len({_way(ways.get(name)) for name in names}) > 1:
            told = ", ".join(f"{name} {_told(ways.get(name))}" for name in names)
            problems.append(
                f"One parameter has several names, and the plan cuts it in several ways: {told}. "
                f"'embedding' and 'column' cut alike."
            )
    problems += [
        f"{name} is cut already: a plan is applied once."
        if sharding.axis == AXIS
        else f"{name} is divided along {sharding.axis}, and stays so: say 'replicate' for it."
        for name, parameter in model.named_parameters()
        if (sharding := sharding_of(parameter)) is not None
        and (sharding.axis == AXIS or name in ways)
    ]
    return problems


def _way(sharding: Sharding | None) -> object:
    return sharding and (sharding.dim, sharding.pieces)


def _told(sharding: Sharding | None) -> str:
    return "stays whole" if sharding is None else f"along dim {sharding.dim}"


def _agree(mesh: Mesh, problem: str, words: str, model: nn.Module) -> None:
    """Refuse on all ranks what one refuses, and plans or models that differ."""
    shapes = "" if problem else _shapes(model)
    mine = [problem, hashlib.sha256(words.encode()).hexdigest(), shapes]
    every = mesh.comm.all_gather_object(mine)
    if problem:
        raise InvalidArgumentError(problem)
    for rank, theirs in enumerate(every):
        if theirs[0]:
            raise CollectiveMismatch(f"apply_plan was refused on rank {rank}: {theirs[0]}")
    # Stages of a pipeline may have other layers.
    alike = mesh.ranks(*(name for name in mesh.axes if name != "pp"))
    for at, what in ((1, "plans or options of apply_plan"), (2, "models")):
        for rank in alike:
            if every[rank][at] != mine[at]:
                raise CollectiveMismatch(
                    f"All ranks apply one plan to one model, but rank {mesh.comm.rank} and rank "
                    f"{rank} have different {what}."
                )


def _shapes(model: nn.Module) -> str:
    told = [
        # Of what is divided along another axis, experts for example, ranks may have more and fewer.
        (name, tuple(one.shape) if cut is None else cut.whole_shape(one.shape), str(one.dtype))
        for name, one in model.named_parameters()
        for cut in (sharding_of(one),)
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()


@torch.no_grad()
def _share(model: nn.Module, mesh: Mesh) -> None:
    """Give all ranks of the axis the values of its first one."""
    comm = mesh[AXIS]
    for tensor in [*model.parameters(), *model.buffers()]:
        if comm.size > 1 and not tensor.is_meta:
            whole = tensor.detach().contiguous()
            tensor.copy_(comm.broadcast(whole))
