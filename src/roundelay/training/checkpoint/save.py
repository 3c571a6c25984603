"""`rd.save` and `rd.load`: training stops on some ranks and goes on, bit for bit, on others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from roundelay.arguments import path_of, truth
from roundelay.communicator import Communicator
from roundelay.errors import CheckpointMismatch, CollectiveMismatch, InvalidArgumentError
from roundelay.training._run import Run, run_of
from roundelay.training.checkpoint._commit import Commit
from roundelay.training.checkpoint._compare import Differences, Rename, compare, renamed
from roundelay.training.checkpoint._files import Disk, check_file
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, decode
from roundelay.training.checkpoint._partial import Partial, present
from roundelay.training.checkpoint._random_state import restore_random, seed_from
from roundelay.training.checkpoint._reader import Reader, manifest_text, need_safetensors
from roundelay.training.checkpoint._write import (
    Sheet,
    buffers_of,
    modules_with_extra,
    outline,
    take_down,
)
from roundelay.training.checkpoint.keep import Series
from roundelay.training.checkpoint.saving import Saving, beside_training, together
from roundelay.training.optimizer.state_tree import each_tensor, put_beside
from roundelay.training.optimizer.whole_state import whole_beside

__all__ = ["Loaded", "Saving", "load", "save"]

#: All that a save does to the disk goes through it.
DISK = Disk()


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


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,  # Any: whatever has state_dict and load_state_dict
    extra: Any = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Write a prepared model and all that its training needs to go on. Every rank calls it.

    `path` is a folder that all ranks reach. Each rank writes its share. What was there before stays
    whole until the new one is complete on the disk. `extra` is the first rank's: numbers, strings,
    lists, dicts, arrays and tensors. Gradients are not kept: save between steps. Without an
    optimizer, weights only are saved.

    With `wait=False` each rank copies its share and goes on; a thread writes the copy. What goes
    wrong there is raised on all ranks by `wait()` of what this returns, by the next save or load,
    or when the communicator closes. A script that ends waits for it.

    With `keep=3`, and a path that ends in a number, the last three checkpoints stay: complete older
    ones beside this one, whose names differ in that number, are removed when it is complete.
    """
    # Absolute, for who changes the folder that he works in while it is written.
    wait = truth("wait of save", wait)
    run, where = _check("save", model, optimizer), path_of("path of save", path).absolute()
    series = None if keep is None else Series(where, keep)
    commit = Commit(run.comm if wait else run.saves.beside(), DISK, where, series)
    run.saves.settle(where)
    run.state.take_edits()
    form = "weights only" if optimizer is None else "with the optimizer", keep, _state_of(run)
    made = together(run.comm, commit.what, lambda: (commit.make_folder(), form))
    commit.folder = made[0][0]
    _check_alike(commit, run, [form for _, form in made])
    taken: list[tuple[Manifest, Sheet, dict[str, torch.Tensor]]] = []

    def take() -> None:
        manifest = outline(run, weights_only=optimizer is None)
        say = _said(run, optimizer, scheduler, extra)
        sheet = take_down(run, say, weights_only=optimizer is None, copy=not wait)
        taken.append((manifest, *sheet))

    try:
        run.compare()
        together(run.comm, commit.what, take)
    except BaseException:
        commit.take_away()
        raise
    saving = Saving(where)
    write = partial(commit.write, *taken.pop())
    if wait:
        write()
    else:
        run.saves.begin(saving, partial(write, beside_training(write.args[-1])))
    return saving


def _state_of(run: Run) -> tuple[int, dict[str, int]]:
    """Return what ranks share between steps: how many there were, and what was written by hand."""
    run.grad_hooks.see_edits()
    return (run.step.calls, run.step.written) if run.strategy.synchronous else (0, {})


def _check_alike(commit: Commit, run: Run, forms: list[Any]) -> None:
    """Refuse a checkpoint of which every rank would write something else."""
    if all(one == forms[0] for one in forms):
        return
    commit.take_away()
    # To be compared once more.
    run.step.written.update({name: 0 for _, _, (_, written) in forms for name in written})
    text = "\n".join(
        f"  rank {rank}: {what}, keep={keep}, after {calls} calls of step()"
        + (f", {', '.join(sorted(written))} written by hand" if written else "")
        for rank, (what, keep, (calls, written)) in enumerate(forms)
    )
    raise CollectiveMismatch(
        f"rank {run.comm.rank} could not {commit.what}: the ranks would save different things.\n"
        f"{text}\nA checkpoint that was there before is as it was."
    )


def _said(run: Run, optimizer: Any, scheduler: Any, extra: Any) -> dict[str, Any]:
    """Return what the first rank says for all."""
    groups = [] if optimizer is None else run.setup.optimizer.param_groups
    each = [] if optimizer is None else run.setup.optimizer.all
    return {
        "state": [whole_beside(one) for one in each],
        "groups": [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ],
        "modules": {
            name: module.get_extra_state() for name, module in modules_with_extra(run.setup.model)
        },
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "extra": extra,
    }


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
    run, where = _check("load", model, optimizer), path_of("path of load", path)
    comm = run.comm
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
        for file in manifest.files[comm.rank :: comm.size]:
            check_file(where / manifest.folder / file.name, file)

    together(comm, f"load {where}", check)
    saved = Reader(where, manifest, written)
    with_state = optimizer is not None and not found.optimizer
    only = Partial(saved, present(run, found.untouched), with_state=with_state)

    def take() -> None:
        others = saved.beside() if with_state else []
        run.state.check_beside([key for one in others for key in one])
        run.state.take_back(only)
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
        run.step.deeds.clear()  # of which nothing is left
        run.counted_from = run.steps, run.state.traffic()
    extra = saved.unpack(manifest.extra)
    if optimizer is not None and manifest.random:
        _go_on_randomly(saved, comm)
    lists = found.missing, found.unexpected, found.reshaped, found.lines
    return Loaded(
        manifest.steps, manifest.ranks, manifest.strategy, extra, *(tuple(one) for one in lists)
    )


def _check(call: str, model: torch.nn.Module, optimizer: object) -> Run:
    run = run_of(call, model)
    run.state.meet()
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    own = run.setup.optimizer.all
    same = len(given) == len(own) and all(one is two for one, two in zip(given, own, strict=True))
    if optimizer is not None and not same:
        raise InvalidArgumentError(
            f"{call} needs the optimizer that rd.prepare has returned with this model, or all of "
            f"them in their order, or none: for weights only."
        )
    if run.step.accumulating:
        raise InvalidArgumentError(
            f"{call} comes between steps, not between the micro-batches of one: gradients are not "
            f"kept. Call it after optimizer.step() of a whole batch."
        )
    return run


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
    device = next((one.tensor.device for one in run.setup.parameters), None)
    for one in run.setup.optimizer.all:
        found = others.pop(0) if others else {}
        put_beside(one, each_tensor(found, lambda _, one: one.to(device) if one.dim() else one))


def _go_on_randomly(saved: Reader, comm: Communicator) -> None:
    states = saved.manifest.random
    if comm.rank < len(states):
        restore_random(saved.unpack(states[comm.rank]))
    else:
        seed_from(saved.unpack(states[0]), comm.rank)
