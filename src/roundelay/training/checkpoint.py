"""`rd.save` and `rd.load`: training stops on some ranks and goes on, bit for bit, on others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CheckpointError, InvalidArgumentError, RoundelayError
from roundelay.training._checkpoint_compare import compare
from roundelay.training._checkpoint_files import Disk, check_file, make_folder, put_in_place
from roundelay.training._checkpoint_format import MANIFEST, decode, encode
from roundelay.training._checkpoint_random import restore_random, seed_from
from roundelay.training._checkpoint_read import Reader, need_safetensors
from roundelay.training._checkpoint_write import (
    buffers_of,
    gather_up,
    modules_with_extra,
    write_rank,
)
from roundelay.training._run import Run, run_of

__all__ = ["Loaded", "load", "save"]

#: All that a save does to the disk goes through it.
DISK = Disk()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint says beside what it put back."""

    steps: int  # that were trained when it was written
    ranks: int  # that wrote it
    strategy: str
    extra: Any  # as it was given to `save`


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,  # Any: whatever has state_dict and load_state_dict
    extra: Any = None,
) -> None:
    """Write a prepared model and all that its training needs to go on. Every rank calls it.

    `path` is a folder that all ranks reach. Each rank writes its share. What was there before stays
    whole until the new one is complete on the disk. `extra` is the first rank's: numbers, strings,
    lists, dicts, arrays and tensors. Gradients are not kept: save between steps.
    """
    run, where = _check("save", model, optimizer), Path(path)
    run.sharing.take_edits()
    comm, disk = run.comm, DISK
    first = comm.rank == 0
    folder: str = _together(
        comm, f"save to {where}", lambda: make_folder(disk, where) if first else ""
    )[0]
    try:
        say = {
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
            "modules": {
                name: module.get_extra_state() for name, module in modules_with_extra(model)
            },
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "extra": extra,
        }
        accounts = _together(
            comm, f"save to {where}", lambda: write_rank(run, disk, where / folder, say)
        )

        def finish() -> None:
            if first:
                put_in_place(disk, where, folder, encode(gather_up(run, folder, accounts)))

        _together(comm, f"save to {where}", finish)
    except BaseException:
        if first:
            _take_away(where, folder)
        raise


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,  # Any: whatever has state_dict and load_state_dict
) -> Loaded:
    """Put back what `save` wrote, under any strategy and any number of ranks. Every rank calls it.

    Parameters, buffers, optimizer, loss scale, scheduler and random numbers are what they were.
    With another number of ranks, those that were there before get their own random numbers back,
    and new ones a seed made from the first rank's.
    """
    run, where = _check("load", model, optimizer), Path(path)
    comm = run.comm
    text: bytes = _together(
        comm, f"load {where}", lambda: _manifest_text(where) if comm.rank == 0 else b""
    )[0]
    manifest = decode(text, where / MANIFEST)
    compare(where, manifest, run, scheduler=scheduler is not None)

    def check() -> None:
        need_safetensors()
        for file in manifest.files[comm.rank :: comm.size]:
            check_file(where / manifest.folder / file.name, file)

    _together(comm, f"load {where}", check)
    saved = Reader(where, manifest)
    _together(comm, f"load {where}", lambda: _take(run, saved, scheduler))
    run.sharing.refresh()
    run.step.number = manifest.steps
    run.counted_from = run.steps, run.sharing.traffic()
    extra = saved.unpack(manifest.extra)
    _go_on_randomly(saved, comm)
    return Loaded(manifest.steps, manifest.ranks, manifest.strategy, extra)


def _check(call: str, model: torch.nn.Module, optimizer: object) -> Run:
    run = run_of(call, model)
    if optimizer is not run.setup.optimizer:
        raise InvalidArgumentError(
            f"{call} needs the optimizer that rd.prepare has returned with this model."
        )
    if run.step.accumulating:
        raise InvalidArgumentError(
            f"{call} comes between steps, not between the micro-batches of one: gradients are not "
            f"kept. Call it after optimizer.step() of a whole batch."
        )
    return run


def _together(comm: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do something on every rank and return what each gave; what fails anywhere raises on all."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = work()
    except OSError as error:
        problem = CheckpointError(f"{error.strerror or error}: {error.filename or what}")
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        problem = error
    told = "" if problem is None else f"{problem}"
    every = comm.all_gather_object((told or ("" if problem is None else repr(problem)), result))
    failed = [(rank, one) for rank, (one, _) in enumerate(every) if one]
    if failed:
        text = "\n".join(f"  rank {rank}: {one}" for rank, one in failed)
        message = f"Could not {what}:\n{text}\nA checkpoint that was there before is as it was."
        if problem is None or type(problem) is CheckpointError:
            raise CheckpointError(message)
        if isinstance(problem, RoundelayError):
            raise problem
        raise CheckpointError(message) from problem
    return [one for _, one in every]


def _take_away(where: Path, folder: str) -> None:
    """Remove a save that came to nothing, unless it is the checkpoint already."""
    manifest = where / MANIFEST
    try:
        if manifest.exists() and folder.encode() in manifest.read_bytes():
            return
    except OSError:
        return
    shutil.rmtree(where / folder, ignore_errors=True)
    (where / f"{MANIFEST}.{folder}").unlink(missing_ok=True)


def _manifest_text(where: Path) -> bytes:
    try:
        return (where / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"There is no checkpoint at {where}: no {MANIFEST} in it.") from None


@torch.no_grad()
def _take(run: Run, saved: Reader, scheduler: Any) -> None:
    manifest, setup = saved.manifest, run.setup
    run.sharing.take_back(saved)
    for name, buffer in buffers_of(setup.model):
        buffer.copy_(saved.buffer(name))
    modules = saved.unpack(manifest.modules)
    for name, module in modules_with_extra(setup.model):
        module.set_extra_state(modules[name])
    for group, written in zip(setup.optimizer.param_groups, manifest.groups, strict=True):
        group.update(saved.unpack(written.options))
    if setup.scaler is not None and manifest.scaler is not None:
        setup.scaler.restore(manifest.scaler)
    if scheduler is not None:
        scheduler.load_state_dict(saved.unpack(manifest.scheduler))


def _go_on_randomly(saved: Reader, comm: Communicator) -> None:
    states = saved.manifest.random
    if comm.rank < len(states):
        restore_random(saved.unpack(states[comm.rank]))
    else:
        seed_from(saved.unpack(states[0]), comm.rank)
