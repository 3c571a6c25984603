"""`rd.read_checkpoint`: what a checkpoint holds, for one process, without ranks or `prepare`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from roundelay.arguments import path_of, shown, truth
from roundelay.errors import CheckpointError, InvalidArgumentError
from roundelay.training.checkpoint._compare import extra_state_key
from roundelay.training.checkpoint._files import check_file
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, TensorEntry, decode
from roundelay.training.checkpoint._reader import Reader, manifest_text, need_safetensors
from roundelay.training.checkpoint.parts import taken

__all__ = ["Checkpoint", "Weights", "read_checkpoint"]

OFTEN = 5  # a checkpoint that is replaced while it is opened is opened again


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    check: bool = True,
) -> Checkpoint:
    """Open what `save` wrote, whatever ranks wrote it, in any process.

    Tensors are read when they are asked for, mapped from the files where they lie in one piece.
    Floating-point weights come in `dtype`, all of them on `device`. `check` compares every file
    with its checksum first, which reads all of it once.
    """
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and not floats:
        raise InvalidArgumentError(
            f"dtype of read_checkpoint is one of torch's floating-point dtypes, not {dtype!r}."
        )
    if device is not None:
        _check_device(device)
    where, check = path_of("path of read_checkpoint", path), truth("check", check)
    need_safetensors()
    for _ in range(OFTEN):
        text = manifest_text(where)
        manifest = decode(text, where / MANIFEST)
        try:
            return Checkpoint(_opened(where, manifest, check=check), dtype, device)
        except (CheckpointError, OSError) as error:
            if manifest_text(where) == text:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{where} can't be read: {error}") from None
    raise CheckpointError(f"{where} is replaced faster than it can be read.")


def _check_device(device: object) -> None:
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload] # that is the question
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise InvalidArgumentError(
            f"device of read_checkpoint can't be {shown(device)}: {shown(error)}"
        ) from None


def _opened(where: Path, manifest: Manifest, *, check: bool) -> Reader:
    """Return a reader that holds all files open, so that they stay if a save replaces them."""
    reader = Reader(where, manifest)
    if check:
        for file in manifest.files:
            check_file(where / manifest.folder / file.name, file)
    reader.open_all()
    return reader


class Checkpoint:
    """What a checkpoint holds; see `rd.read_checkpoint`."""

    def __init__(
        self, reader: Reader, dtype: torch.dtype | None, device: str | torch.device | None
    ) -> None:
        self.path, self._reader = reader.path, reader
        manifest = reader.manifest
        self.steps, self.ranks, self.strategy = manifest.steps, manifest.ranks, manifest.strategy
        #: The model's state by its original names, tensor by tensor.
        self.weights = Weights(reader, dtype, device)

    def __repr__(self) -> str:
        count = len(self.weights.tensors())
        return f"<Checkpoint {self.path}: {count} tensors after {self.steps} steps>"

    def state_dict(self) -> dict[str, Any]:
        """Return what `state_dict()` of the model on one device would be; tied names are one."""
        return dict(self.weights.tied())

    @property
    def extra(self) -> Any:
        """What was given to `save`."""
        return self._reader.unpack(self._reader.manifest.extra)

    @property
    def scheduler(self) -> Any:
        """What the scheduler's `state_dict` gave."""
        return self._reader.unpack(self._reader.manifest.scheduler)

    def optimizers(self) -> list[dict[str, Any]]:
        """Return the state of every optimizer by names of parameters; none of weights only."""
        return [
            {
                "kind": optimizer.kind,
                "state": {
                    name: found
                    for group in optimizer.groups
                    for name in group.names
                    if (found := self._state(name))
                }
                | {key: found for each in self._reader.beside() for key, found in each.items()},
                "param_groups": [
                    {**self._reader.unpack(group.options), "params": list(group.names)}
                    for group in optimizer.groups
                ],
            }
            for optimizer in self._reader.manifest.optimizers
        ]

    def _state(self, name: str) -> dict[str, Any]:
        shape = self._reader.manifest.parameters[name].shape
        count = self._reader.manifest.parameters[name].numel
        split, whole = taken(self._reader, name, 0, count)
        return {**{key: one.view(shape) for key, one in split.items()}, **whole}


class Weights(Mapping[str, Any]):
    """Parameters, buffers and extra state of a model by name, each read when it is asked for."""

    def __init__(
        self, reader: Reader, dtype: torch.dtype | None, device: str | torch.device | None
    ) -> None:
        self._reader, self._dtype, self._device = reader, dtype, device
        manifest = reader.manifest
        names = [*manifest.parameters, *manifest.aliases, *manifest.buffers]
        self._names = dict.fromkeys(names)
        self._extra = {extra_state_key(name): name for name in manifest.modules}

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._extra))

    def __len__(self) -> int:
        return len(self._names) + len(self._extra)

    def __getitem__(self, name: str) -> Any:
        if name in self._extra:
            return self._reader.module(self._extra[name])
        key, entry = self.entry(name)
        tensor = self._reader.elements(key, entry, 0, entry.numel).view(entry.shape)
        return tensor.to(self._device, self.dtype(name))

    def tensors(self) -> list[str]:
        """Return the names of tensors, of tied ones the first."""
        return [name for name in self._names if name not in self._reader.manifest.aliases]

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters, each with the first."""
        return dict(self._reader.manifest.aliases)

    def tied(self) -> Iterator[tuple[str, Any]]:
        """Yield all of it; what is tied is the same object."""
        aliases = self._reader.manifest.aliases
        first = {name: self[name] for name in self if name not in aliases}
        for name in self:
            yield name, first[aliases.get(name, name)]

    def entry(self, name: str) -> tuple[str, TensorEntry]:
        """Return where a tensor lies."""
        manifest, own = self._reader.manifest, self._reader.own(name)
        if own in manifest.parameters:
            return f"parameter/{own}", manifest.parameters[own]
        if name in manifest.buffers:
            return f"buffer/{name}", manifest.buffers[name]
        raise KeyError(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return in which dtype a tensor comes, without reading it."""
        found = self._reader.dtype(*self.entry(name))
        return self._dtype if self._dtype is not None and found.is_floating_point else found
