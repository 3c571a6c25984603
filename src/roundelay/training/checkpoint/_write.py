"""What one rank writes of a checkpoint, and how the ranks' accounts make one manifest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from roundelay.training._run import Run
from roundelay.training.checkpoint import _manifest as form
from roundelay.training.checkpoint._files import Disk, write_tensors
from roundelay.training.checkpoint._manifest import (
    File,
    Group,
    Manifest,
    Optimizer,
    TensorEntry,
    TensorPart,
    Where,
)
from roundelay.training.checkpoint._random_state import random_state
from roundelay.training.checkpoint.parts import SavedPart
from roundelay.training.checkpoint.values import pack
from roundelay.training.checkpoint.window import of_whole, shapes_of, window_of


class SavedStage(msgspec.Struct):
    """What one stage of a pipeline has of a model: its tensors by name, with their shapes."""

    parameters: dict[str, list[int]]
    aliases: dict[str, str]
    buffers: dict[str, list[int]]
    groups: list[list[str]]  # of the optimizer, by names
    modules: dict[str, Any]


class Sheet(msgspec.Struct):
    """One rank's account of what it has written."""

    file: File | None = None
    stretches: dict[str, list[tuple[int, int]]] = {}  # of parameters
    windows: dict[str, tuple[int, list[tuple[int, int]]]] = {}  # of those that a mesh divides
    elements: dict[str, list[str]] = {}  # the state there is on each
    whole: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[int]] = {}  # shapes
    random: Any = None
    more: dict[str, Any] = {}  # what the first rank says for all
    stage: SavedStage | None = None  # of a later stage of a pipeline, said by its first rank


_read = msgspec.json.Decoder(Sheet).decode


def take_down(
    run: Run, say: Mapping[str, Any], *, weights_only: bool, copy: bool
) -> tuple[Sheet, dict[str, torch.Tensor]]:
    """Return what this rank writes, and its account of it. `say` is what the first says for all.

    A copy is for who goes on training before it is written.
    """
    sheet, tensors = Sheet(), dict[str, torch.Tensor]()
    rank, mesh = run.everyone.rank, run.setup.mesh

    def put(tensor: torch.Tensor) -> str:
        name = f"{rank}.{len(sheet.tensors)}"
        sheet.tensors[name] = list(tensor.shape)
        tensors[f"value/{name}@0"] = tensor.detach().reshape(-1)
        return name

    for part in own_parts(run):
        if mesh is not None and part.name in mesh.shardings:
            window = window_of(mesh.shardings[part.name])
            sheet.windows[part.name] = window.dim, [*window.spans]
        sheet.stretches.setdefault(part.name, []).append((part.start, part.stop))
        tensors[f"parameter/{part.name}@{part.start}"] = part.values
        if weights_only:
            continue
        sheet.elements[part.name] = list(part.elements)
        for key, values in part.elements.items():
            tensors[f"state.{key}/{part.name}@{part.start}"] = values
        if part.whole:
            what = f"the optimizer's state of {part.name}"
            sheet.whole[part.name] = pack(of_whole(run.setup, part), put, what)
    if not weights_only:
        sheet.random = pack(random_state(), put, "the state of random numbers")
    _speak(run, say, sheet, tensors, put)
    return sheet, _copies(tensors) if copy else tensors


def _speak(
    run: Run,
    say: Mapping[str, Any],
    sheet: Sheet,
    tensors: dict[str, torch.Tensor],
    put: Callable[[torch.Tensor], str],
) -> None:
    """Have the first rank, or that of a stage, say what is the same on all."""
    rank, mesh = run.everyone.rank, run.setup.mesh
    staged = mesh is not None and mesh.staged and mesh.first_of_stage
    if rank == 0 or staged:
        for name, buffer in buffers_of(run.setup.model):
            tensors[f"buffer/{name}@0"] = buffer.detach().reshape(-1)
    if rank == 0:
        sheet.more = {key: pack(value, put, key) for key, value in say.items()}
    elif staged:
        sheet.stage = _stage(run, pack(say["modules"], put, "modules"))


def own_parts(run: Run) -> Iterator[SavedPart]:
    """Yield what this rank says of parameters: of what ranks with the same data have alike, one."""
    mesh = run.setup.mesh
    for part in run.state.to_save():
        if mesh is None or part.name in mesh.own:
            yield part


def _stage(run: Run, modules: dict[str, Any]) -> SavedStage:
    manifest = outline(run, weights_only=False)
    # What an earlier stage has as well is written there, under its name.
    first = {} if run.setup.mesh is None else run.setup.mesh.aliases
    return SavedStage(
        {name: entry.shape for name, entry in manifest.parameters.items() if name not in first},
        {**manifest.aliases, **first},
        {name: entry.shape for name, entry in manifest.buffers.items()},
        [[first.get(name, name) for name in group.names]
         for group in manifest.optimizers[0].groups],
        modules,
    )  # fmt: skip


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies where the tensors lie; on the host, if their device has no room for more."""
    made = {}
    for key, tensor in tensors.items():
        try:
            made[key] = tensor.detach().clone()
        except torch.OutOfMemoryError:
            made[key] = tensor.detach().cpu()
    return made


def write_down(
    disk: Disk, folder: Path, rank: int, sheet: Sheet, tensors: Mapping[str, torch.Tensor]
) -> bytes:
    """Write this rank's file; return its account, for the first rank."""
    sheet.file = write_tensors(disk, folder / f"rank-{rank:05}.safetensors", tensors)
    return msgspec.json.encode(sheet)


def outline(run: Run, *, weights_only: bool) -> Manifest:
    """Return what a manifest says of the model and its training, as they are now."""
    setup = run.setup
    return form.new(
        ranks=run.everyone.size,
        strategy=type(run.strategy).__name__,
        steps=run.steps,
        saved=time.time(),
        parameters={
            name: TensorEntry([*shape], []) for name, shape in shapes_of(run.setup).items()
        },
        aliases=aliases_of(setup.model),
        buffers={
            name: TensorEntry(list(one.shape), [Where(0, 0, one.numel())])
            for name, one in buffers_of(setup.model)
        },
        optimizers=[] if weights_only else [_optimizer(run)],
        scaler=None if weights_only or setup.scaler is None else setup.scaler.state(),
    )


def _optimizer(run: Run) -> Optimizer:
    """Return the groups by the names in them; their options are the first rank's to say."""
    names = {id(parameter.tensor): parameter.name for parameter in run.setup.parameters}
    groups = [[names[id(one)] for one in group if id(one) in names] for group in run.setup.groups]
    return Optimizer(run.setup.optimizer.name, [Group(each, {}) for each in groups])


def gather_up(outline: Manifest, folder: str, accounts: Sequence[bytes]) -> Manifest:
    """Complete a manifest by what all ranks have written."""
    sheets = [_read(text) for text in accounts]
    for rank, sheet in enumerate(sheets):
        if sheet.stage is not None:
            outline = _joined(outline, rank, sheet.stage)
    more = sheets[0].more
    entries = {name: _entry(name, parameter.shape, sheets)
               for name, parameter in outline.parameters.items()}  # fmt: skip
    kinds = {name: kinds for sheet in sheets for name, kinds in sheet.elements.items()}
    options = iter(more["groups"])
    return msgspec.structs.replace(
        outline,
        folder=folder,
        files=[sheet.file for sheet in sheets],
        parameters=entries,
        elements={
            name: dict.fromkeys(found, entries[name]) for name, found in kinds.items() if found
        },
        whole={name: found for sheet in sheets for name, found in sheet.whole.items()},
        optimizers=[
            Optimizer(
                optimizer.kind,
                [Group(group.names, next(options)) for group in optimizer.groups],
                more["state"],
            )
            for optimizer in outline.optimizers
        ],
        modules={**more["modules"], **outline.modules},
        tensors={
            name: TensorEntry(shape, [Where(rank, 0, torch.Size(shape).numel())])
            for rank, sheet in enumerate(sheets)
            for name, shape in sheet.tensors.items()
        },
        random=[sheet.random for sheet in sheets] if outline.optimizers else [],
        scheduler=more["scheduler"],
        extra=more["extra"],
    )


def _entry(name: str, shape: list[int], sheets: Sequence[Sheet]) -> TensorEntry:
    """Return where a parameter lies, and its parts where a mesh divides it."""
    parts: dict[tuple[int, tuple[tuple[int, int], ...]] | None, list[Where]] = {}
    for rank, sheet in enumerate(sheets):
        window = sheet.windows.get(name)
        key = None if window is None else (window[0], tuple(window[1]))
        for start, stop in sheet.stretches.get(name, []):
            parts.setdefault(key, []).append(Where(rank, start, stop))
    for where in parts.values():
        where.sort(key=lambda stretch: (stretch.start, stretch.stop))
    if None in parts or not parts:
        return TensorEntry(shape, parts.get(None, []))
    listed = [TensorPart(key[0], [*key[1]], where) for key, where in parts.items() if key]
    return TensorEntry(shape, [], listed)


def _joined(outline: Manifest, rank: int, stage: SavedStage) -> Manifest:
    """Return an outline with what another stage of a pipeline has."""
    new = [name for name in stage.buffers if name not in outline.buffers]
    return msgspec.structs.replace(
        outline,
        parameters={
            **{name: TensorEntry(shape, []) for name, shape in stage.parameters.items()},
            **outline.parameters,
        },
        aliases={**stage.aliases, **outline.aliases},
        buffers={
            **outline.buffers,
            **{name: TensorEntry(stage.buffers[name],
                                 [Where(rank, 0, math.prod(stage.buffers[name]))])
               for name in new},
        },
        optimizers=[
            Optimizer(
                optimizer.kind,
                [Group([*dict.fromkeys([*group.names, *names])], group.options)
                 for group, names in zip(optimizer.groups, stage.groups, strict=True)],
            )
            for optimizer in outline.optimizers
        ],
        modules={**stage.modules, **outline.modules},
    )  # fmt: skip


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    found = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(one), name) != name:
            found[name] = first[id(one)]
    return found


def buffers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to a model's state, each once."""
    seen = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if own not in module._non_persistent_buffers_set and id(buffer) not in seen:  # noqa: SLF001 - torch has no other way to ask
                seen.add(id(buffer))
                yield name, buffer


def modules_with_extra(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that have state beside parameters and buffers."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module
