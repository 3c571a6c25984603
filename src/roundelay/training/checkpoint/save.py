"""`rd.save`: every rank writes its share of a model and of all that its training needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from roundelay.arguments import path_of, truth
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training._run import Run, run_of
from roundelay.training.checkpoint._commit import Commit
from roundelay.training.checkpoint._files import Disk
from roundelay.training.checkpoint._manifest import Manifest
from roundelay.training.checkpoint._write import (
    Sheet,
    modules_with_extra,
    outline,
    take_down,
)
from roundelay.training.checkpoint.keep import Series
from roundelay.training.checkpoint.saving import Saving, beside_training, together
from roundelay.training.optimizer.whole_state import whole_beside

__all__ = ["Saving", "checked_run", "save"]

#: All that a save does to the disk goes through it.
DISK = Disk()


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
    run, where = checked_run("save", model, optimizer), path_of("path of save", path).absolute()
    series = None if keep is None else Series(where, keep)
    commit = Commit(run.everyone if wait else run.saves.beside(), DISK, where, series)
    run.saves.settle(where)
    run.take_edits()
    form = "weights only" if optimizer is None else "with the optimizer", keep, _state_of(run)
    made = together(run.everyone, commit.what, lambda: (commit.make_folder(), form))
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
        together(run.everyone, commit.what, take)
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
    if not run.strategy.synchronous:
        return 0, {}
    alike = run.everyone is run.comm  # or ranks have parts, which `compare` does not mix
    return run.step.calls, run.step.written if alike else {}


def _check_alike(commit: Commit, run: Run, forms: list[Any]) -> None:
    """Refuse a checkpoint of which every rank would write something else."""
    if all(form == forms[0] for form in forms):
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
        f"rank {run.everyone.rank} could not {commit.what}: the ranks would save different "
        f"things.\n"
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


def checked_run(call: str, model: torch.nn.Module, optimizer: object) -> Run:
    """Return what trains a model, if it is between steps and the optimizers are its own."""
    run = run_of(call, model)
    run.state.meet()
    run.state.enter(f"rd.{call}")
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
