"""`rd.load`: training goes on, bit for bit, on any number of ranks and under any strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.arguments import path_of, truth
from roundelay.communicator import Communicator
from roundelay.errors import CheckpointMismatch
from roundelay.training._mesh_state import whole_tensors
from roundelay.training._phases import checkpointing
from roundelay.training._run import Run, trace_of
from roundelay.training.checkpoint._compare import Differences, Rename, compare, renamed
from roundelay.training.checkpoint._files import check_file
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, decode
from roundelay.training.checkpoint._random_state import restore_random, seed_from
from roundelay.training.checkpoint._reader import Reader, manifest_text, need_safetensors
from roundelay.training.checkpoint._write import buffers_of, modules_with_extra
from roundelay.training.checkpoint.save import check_scheduler, checked_run
from roundelay.training.checkpoint.saving import together
from roundelay.training.checkpoint.window import local_state
from roundelay.training.optimizer.state_tree import each_tensor, put_beside

__all__ = ["Loaded", "load"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint says beside what it put back, and what it did not fit."""

    steps: int  # that were trained when it was written
    ranks: int  # that wrote it
    strategy: str
    extra: Any  # as it was given to `save`
    #: Parameters and buffers that the checkpoint has not: they are as they were.
    missing: tuple[str, ...] = field(default=(), repr=False)
    #: That are only in the checkpoint.
    unexpected: tuple[str, ...] = field(default=(), repr=False)
    #: That have another shape in the checkpoint: they are as they were.
    reshaped: tuple[str, ...] = field(default=(), repr=False)
    #: All of these and others, in words.
    differences: tuple[str, ...] = field(default=(), repr=False)


@checkpointing(trace_of)
def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,  # Any: whatever has state_dict and load_state_dict
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Put back what `save` wrote, under any strategy and any number of ranks. Every rank calls it.

    Parameters, buffers, optimizer, loss scale, scheduler and random numbers are what they were.
    With another number of ranks, those that were there before get their own random numbers back,
    and new ones a seed made from the first rank's. Without an optimizer, only parameters and
    buffers are loaded, and the optimizer of the model begins with no state.

    A checkpoint that differs from the model is refused, with a list of all that differs. With
    `strict=False` what fits is loaded, the rest of the model stays as it is, and the list is in
    what this returns. `rename={"old.": "new."}` gives prefixes of names in the checkpoint others.
    """
    strict = truth("strict of load", strict)
    run, where = checked_run("load", model, optimizer), path_of("path of load", path)
    comm = run.everyone
    run.saves.settle(where)
    text: bytes = together(
        comm, f"load {where}", lambda: manifest_text(where) if comm.rank == 0 else b""
    )[0]
    manifest = decode(text, where / MANIFEST)
    seen, written = renamed(manifest, rename)
    found = compare(seen, run, optimizer=optimizer is not None, scheduler=scheduler is not None)
    if strict and found.lines:
        raise CheckpointMismatch(where, found.lines)

    def check() -> None:
        need_safetensors()
        check_scheduler("load", scheduler)
        for file in manifest.files[comm.rank :: comm.size]:
            check_file(where / manifest.folder / file.name, file)

    together(comm, f"load {where}", check)
    saved = Reader(where, manifest, written)
    with_state = optimizer is not None and not found.optimizer
    only = _Partial(saved, _present(run, found.untouched), with_state=with_state)
    local = local_state(run.setup, only)

    def take() -> None:
        others = saved.beside() if with_state else []
        run.state.check_beside([key for one in others for key in one])
        run.state.take_back(local)
        _take_beside(run, others)
        _take_modules(run, saved, seen, found)
        if optimizer is not None:
            _take_optimizer(run, saved, found)
        if scheduler is not None and manifest.scheduler is not None:
            scheduler.load_state_dict(saved.unpack(manifest.scheduler))

    with torch.no_grad():
        together(comm, f"load {where}", take)
    run.state.refresh()
    if optimizer is not None:
        run.step.number = manifest.steps
        run.step.forget_deeds()  # of which nothing is left
        run.counted_from, run.along_from = (run.steps, run.state.traffic()), run.sent_along()
    extra = saved.unpack(manifest.extra)
    if optimizer is not None and manifest.random:
        _go_on_randomly(saved, comm)
    lists = found.missing, found.unexpected, found.reshaped, found.lines
    return Loaded(
        manifest.steps, manifest.ranks, manifest.strategy, extra, *(tuple(one) for one in lists)
    )


def _take_modules(run: Run, saved: Reader, seen: Manifest, found: Differences) -> None:
    for name, buffer in buffers_of(run.setup.model):
        if name not in found.untouched:
            buffer.copy_(saved.buffer(name))
    for name, module in modules_with_extra(run.setup.model):
        if name in seen.modules:
            module.set_extra_state(saved.module(name))


def _take_optimizer(run: Run, saved: Reader, found: Differences) -> None:
    manifest, setup = saved.manifest, run.setup
    if not found.groups:
        groups = manifest.optimizers[0].groups
        for group, written in zip(setup.optimizer.param_groups, groups, strict=True):
            group.update(saved.unpack(written.options))
    if setup.scaler is not None and manifest.scaler is not None:
        setup.scaler.restore(manifest.scaler)


def _take_beside(run: Run, others: list[dict[Any, Any]]) -> None:
    """Give optimizers what they had for no parameter: all but numbers on the model's device."""
    device = next((parameter.tensor.device for parameter in run.setup.parameters), None)
    for one in run.setup.optimizer.all:
        found = others.pop(0) if others else {}
        put_beside(one, each_tensor(found, lambda _, one: one.to(device) if one.dim() else one))


def _go_on_randomly(saved: Reader, comm: Communicator) -> None:
    states = saved.manifest.random
    if comm.rank < len(states):
        restore_random(saved.unpack(states[comm.rank]))
    else:
        seed_from(saved.unpack(states[0]), comm.rank)


class _Partial:
    """What the checkpoint has, and beside it what the model has; strategies know it as `Saved`."""

    def __init__(
        self, saved: Reader, here: Mapping[str, torch.Tensor], *, with_state: bool
    ) -> None:
        self._saved, self._here, self._with_state = saved, here, with_state

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        if name in self._here:
            return self._here[name].reshape(-1)[start:stop]
        return self._saved.values(name, start, stop)

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat; none where it begins anew."""
        return {} if self._new(name) else self._saved.state(name, start, stop)

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter; none likewise."""
        return {} if self._new(name) else self._saved.whole_state(name)

    def _new(self, name: str) -> bool:
        return not self._with_state or name in self._here


def _present(run: Run, names: set[str]) -> dict[str, torch.Tensor]:
    """Return these parameters whole, as they are on all ranks together. Every rank calls it."""
    wanted = {name for name, _ in run.setup.model.named_parameters()} & names
    if not wanted:
        return {}
    tensors = whole_tensors(run.state)
    return {name: one.detach().clone() for name, one in tensors if name in wanted}
