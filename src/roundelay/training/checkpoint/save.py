"""`rd.save`: every rank writes its share of a model and of all that its training needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundelay.arguments import path_of, shown, truth
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training._mesh_state import meet
from roundelay.training._phases import checkpointing
from roundelay.training._run import Run, run_of, trace_of
from roundelay.training.checkpoint._files import Disk, make_folder, put_in_place
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, encode
from roundelay.training.checkpoint._write import (
    Sheet,
    gather_up,
    modules_with_extra,
    outline,
    take_down,
    write_down,
)
from roundelay.training.checkpoint.keep import Series
from roundelay.training.checkpoint.saving import Saving, beside_training, together
from roundelay.training.optimizer.whole_state import whole_beside

__all__ = ["Saving", "check_scheduler", "checked_run", "save"]

#: All that a save does to the disk goes through it.
DISK = Disk()


@checkpointing(trace_of)
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
    if run.setup.mesh is not None and not run.setup.mesh.alone:
        meet(run.setup, run.setup.mesh, "rd.save")
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
        check_scheduler("save", scheduler)
        say = _said(run, optimizer, scheduler, extra)
        sheet = take_down(run, say, weights_only=optimizer is None, copy=not wait)
        taken.append((manifest, *sheet))

    try:
        run.compare_all()
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


def check_scheduler(call: str, scheduler: Any) -> None:  # Any: may be a mistake
    """Refuse what has no state to be saved or loaded."""
    method = "state_dict" if call == "save" else "load_state_dict"
    if scheduler is not None and not callable(getattr(scheduler, method, None)):
        raise InvalidArgumentError(
            f"scheduler of {call} has {method}(), as torch's have; {shown(scheduler)} has not."
        )


def checked_run(call: str, model: torch.nn.Module, optimizer: object) -> Run:
    """Return what trains a model, if it is between steps and the optimizers are its own."""
    run = run_of(call, model)
    run.state.meet()
    run.state.enter(f"rd.{call}")
    run.setup.refuse_renamed(f"rd.{call}")
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


@dataclass(slots=True)
class Commit:
    """Where a save goes, and how it comes to its end on all ranks or on none."""

    comm: Communicator  # of who writes: the ranks that train, or their threads beside
    disk: Disk
    where: Path
    series: Series | None
    folder: str = ""

    @property
    def what(self) -> str:
        """Say what is done, for errors."""
        return f"save to {self.where}"

    def make_folder(self) -> str:
        """Make room, on the first rank, and say where."""
        return make_folder(self.disk, self.where) if self.comm.rank == 0 else ""

    def write(
        self,
        manifest: Manifest,
        sheet: Sheet,
        tensors: Mapping[str, torch.Tensor],
        aside: AbstractContextManager[None] | None = None,
    ) -> None:
        """Write this rank's file and, when all have, put them in place."""
        folder = self.where / self.folder

        def work() -> bytes:
            with aside or nullcontext():
                return write_down(self.disk, folder, self.comm.rank, sheet, tensors)

        try:
            accounts = together(self.comm, self.what, work)
            together(self.comm, self.what, lambda: self._finish(manifest, accounts))
        except BaseException:
            self.take_away()
            raise

    def _finish(self, manifest: Manifest, accounts: list[bytes]) -> None:
        if self.comm.rank == 0:
            text = encode(gather_up(manifest, self.folder, accounts))
            put_in_place(self.disk, self.where, self.folder, text)
            if self.series is not None:
                self.series.drop_older(self.disk)

    def take_away(self) -> None:
        """Remove a save that came to nothing, unless it is the checkpoint already."""
        if self.comm.rank != 0:
            return
        manifest = self.where / MANIFEST
        try:
            if manifest.exists() and self.folder.encode() in manifest.read_bytes():
                return
        except OSError:
            return
        shutil.rmtree(self.where / self.folder, ignore_errors=True)
        (self.where / f"{MANIFEST}.{self.folder}").unlink(missing_ok=True)
