"""The part of a model that one rank holds, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from roundelay.parallel.pipeline._cut import PipelineStage


class PartOfModule(nn.Module):
    """Holds what a rank has of a module of the whole model; its forward is its stage's."""


def attach(
    holder: nn.Module, model: nn.Module, stages: Iterable[PipelineStage], more: Iterable[str]
) -> None:
    """Give `holder` what the stages use of `model`, and more tensors, under the model's names.

    It has them in the model's order.
    """
    stages = list(stages)
    modules = {name for stage in stages for name in stage.modules}
    loose: dict[str, list[str]] = {}
    order = {name: at for at, name in enumerate(model.state_dict())}
    names = {name for stage in stages for name in stage.tensors}.union(more)
    for name in sorted(names, key=lambda name: (order.get(name, len(order)), name)):
        loose.setdefault(name.rpartition(".")[0], []).append(name)
    for where, module in model.named_modules(remove_duplicate=False):  # outer ones come first
        if where in modules and not _has(holder, where):
            parent, last = _parent(holder, where)
            parent.add_module(last, module)
        for name in loose.get(where, ()):
            if not _has(holder, name):
                _attach_tensor(*_parent(holder, name), module)
    holder.train(model.training)


def _attach_tensor(parent: nn.Module, last: str, owner: nn.Module) -> None:
    if last in owner._parameters:  # noqa: SLF001 - torch has no other name
        parent.register_parameter(last, owner._parameters[last])  # noqa: SLF001 - likewise
    elif last in owner._buffers:  # noqa: SLF001 - likewise
        keeps = last not in owner._non_persistent_buffers_set  # noqa: SLF001 - likewise
        parent.register_buffer(last, owner._buffers[last], persistent=keeps)  # noqa: SLF001
    else:
        setattr(parent, last, getattr(owner, last))


def _has(holder: nn.Module, name: str) -> bool:
    at: object = holder
    for part in name.split("."):
        inside = isinstance(at, nn.Module) and any(
            part in kept
            for kept in (at._modules, at._parameters, at._buffers, vars(at))  # noqa: SLF001 - likewise
        )
        if not inside:
            return False
        at = getattr(at, part)
    return True


def _parent(holder: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that is to have the last part of a name, made where it is not there."""
    *path, last = name.split(".")
    at = holder
    for part in path:
        if part not in at._modules:  # noqa: SLF001 - likewise
            at.add_module(part, PartOfModule())
        at = at.get_submodule(part)
    return at, last


def names_in(model: nn.Module, stage: PipelineStage) -> set[str]:
    """Return the names of the parameters that a stage uses, as the whole model has them."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    inside = tuple(f"{module}." for module in stage.modules)
    return {name for name in names if name.startswith(inside) or name in stage.tensors}


def left_over(model: nn.Module, stages: Sequence[PipelineStage]) -> dict[int, list[str]]:
    """Return, by stage, tensors of the model's state under names by which no stage uses them.

    A further name of a parameter is with the first stage that has it; what none uses, with the
    first of all.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    inside = [tuple(f"{module}." for module in stage.modules) for stage in stages]
    home: dict[torch.Tensor, int] = {}
    for at in reversed(range(len(stages))):
        home.update((by_name[name], at) for name in names_in(model, stages[at]))
    found: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        used = any(name.startswith(those) or name in stage.tensors
                   for those, stage in zip(inside, stages, strict=True))  # fmt: skip
        if isinstance(value, torch.Tensor) and not used:
            found.setdefault(home.get(value, 0), []).append(name)
    return found


def tied(
    model: nn.Module, stages: Sequence[PipelineStage], placement: Sequence[int]
) -> dict[str, list[int]]:
    """Return the parameters that several ranks train, by their first name, with those ranks."""
    first: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    ranks: dict[str, set[int]] = {}
    for stage, rank in zip(stages, placement, strict=True):
        for name in names_in(model, stage):
            if by_name[name].requires_grad:
                ranks.setdefault(first[by_name[name]], set()).add(rank)
    order = [name for name in by_name if name in ranks]
    return {name: sorted(ranks[name]) for name in order if len(ranks[name]) > 1}
