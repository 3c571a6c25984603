"""Whether a checkpoint is one of this model and optimizer, and if not, everything that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from roundelay.errors import CheckpointMismatch
from roundelay.training._checkpoint_format import Manifest
from roundelay.training._checkpoint_write import (
    aliases_of,
    buffers_of,
    modules_with_extra,
    optimizer_word,
)
from roundelay.training._run import Run

__all__ = ["compare"]

Shapes = Mapping[str, tuple[int, ...]]


def compare(path: Path, manifest: Manifest, run: Run, *, scheduler: bool) -> None:
    """Raise, listing names and shapes, unless the checkpoint fits what is being trained."""
    model = run.setup.model
    shared = aliases_of(model)
    here = {name: tuple(one.shape) for name, one in model.named_parameters()}
    here.update({other: here[name] for other, name in shared.items()})
    there = {name: tuple(entry.shape) for name, entry in manifest.parameters.items()}
    there.update({other: there[name] for other, name in manifest.aliases.items() if name in there})
    differences = [
        *_shapes(here, there, "parameter"),
        *_shapes(
            {name: tuple(one.shape) for name, one in buffers_of(model)},
            {name: tuple(entry.shape) for name, entry in manifest.buffers.items()},
            "buffer",
        ),
        *_modules(manifest, run),
    ]
    # The optimizer's groups speak of parameters, so they are worth a look only if those agree.
    differences = differences or list(_optimizer(manifest, run))
    if scheduler and manifest.scheduler is None:
        differences.append("scheduler: given here, none in the checkpoint")
    if differences:
        raise CheckpointMismatch(path, differences)


def _shapes(here: Shapes, there: Shapes, kind: str) -> Iterator[str]:
    for name, shape in here.items():
        if name not in there:
            yield f"{kind} {name}: {shape} here, not in the checkpoint"
        elif there[name] != shape:
            yield f"{kind} {name}: {shape} here, {there[name]} in the checkpoint"
    for name, shape in there.items():
        if name not in here:
            yield f"{kind} {name}: {shape} in the checkpoint, not here"


def _modules(manifest: Manifest, run: Run) -> Iterator[str]:
    for name, _ in modules_with_extra(run.setup.model):
        if name not in manifest.modules:
            yield f"module {name}: has extra state here, none in the checkpoint"


def _optimizer(manifest: Manifest, run: Run) -> Iterator[str]:
    setup = run.setup
    word = optimizer_word(setup.optimizer)
    if word != manifest.optimizer:
        yield f"optimizer: {word} here, {manifest.optimizer} in the checkpoint"
    here = {name: one.group for one in setup.parameters for name in one.names}
    there = {name: at for at, group in enumerate(manifest.groups) for name in group.names}
    for other, name in manifest.aliases.items():
        if name in there:
            there[other] = there[name]
    count = len(setup.optimizer.param_groups)
    if count != len(manifest.groups):
        yield f"optimizer: {count} groups here, {len(manifest.groups)} in the checkpoint"
    for name, group in here.items():
        if name not in there:
            yield f"parameter {name}: trained here, frozen in the checkpoint"
        elif there[name] != group:
            yield f"parameter {name}: in group {group} here, {there[name]} in the checkpoint"
    for name in there:
        if name not in here:
            yield f"parameter {name}: frozen here, trained in the checkpoint"
