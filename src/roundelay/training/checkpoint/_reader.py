"""Reading a checkpoint: any elements of any tensor, whichever ranks wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundelay.errors import CheckpointError, MissingPackageError
from roundelay.training.checkpoint._files import NAMES, PAIRS
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, TensorEntry, Where
from roundelay.training.checkpoint.values import unpack
from roundelay.training.checkpoint.window import from_windows

DTYPES = {word: dtype for dtype, word in NAMES.items()}
COMPLEX = {dtype: made for made, dtype in PAIRS.items()}  # of two


def need_safetensors() -> Any:  # Any: a module
    """Return the library that reads safetensors, or say how to get it."""
    try:
        import safetensors  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingPackageError("Reading checkpoints", "safetensors") from None
    return safetensors


def manifest_text(path: Path) -> bytes:
    """Return the text of a checkpoint's manifest."""
    try:
        return (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"There is no checkpoint at {path}: no {MANIFEST} in it.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from None


class Reader:
    """One checkpoint on the disk; what strategies know as `Saved`.

    `written` says what names of today were when it was written, where that was something else.
    """

    def __init__(
        self, path: Path, manifest: Manifest, written: Mapping[str, str] | None = None
    ) -> None:
        self.path, self.manifest = path, manifest
        self._written = written or {}
        self._files: dict[int, Any] = {}
        self._library = need_safetensors()

    def open_all(self) -> None:
        """Open every file now, so that they stay though somebody saves a newer checkpoint."""
        for number in range(len(self.manifest.files)):
            self._open(number)

    def own(self, name: str) -> str:
        """Return by which name a parameter lies in the files."""
        old = self._written.get(name, name)
        return self.manifest.aliases.get(old, old)

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        own = self.own(name)
        return self.elements(f"parameter/{own}", self.manifest.parameters[own], start, stop)

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat."""
        own = self.own(name)
        return {
            key: self.elements(f"state.{key}/{own}", entry, start, stop)
            for key, entry in self.manifest.elements.get(own, {}).items()
        }

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter."""
        found: dict[str, Any] = self.unpack(self.manifest.whole.get(self.own(name), {}))
        return found

    def beside(self) -> list[dict[Any, Any]]:
        """Return what each optimizer has kept under keys that are no parameter."""
        return [self.unpack(one) for each in self.manifest.optimizers for one in each.state]

    def buffer(self, name: str) -> torch.Tensor:
        """Return one buffer."""
        old = self._written.get(name, name)
        entry = self.manifest.buffers[old]
        return self.elements(f"buffer/{old}", entry, 0, entry.numel).view(entry.shape)

    def module(self, name: str) -> Any:  # Any: what get_extra_state gave
        """Return what a module has kept beside parameters and buffers."""
        return self.unpack(self.manifest.modules[self._written.get(name, name)])

    def dtype(self, key: str, entry: TensorEntry) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        where = next(iter(entry.where or [one for part in entry.parts for one in part.where]))
        word, shape = self._found(
            where.file, f"{key}@{where.start}", lambda part: (part.get_dtype(), part.get_shape())
        )
        return COMPLEX.get(DTYPES[word], DTYPES[word]) if len(shape) > 1 else DTYPES[word]

    def unpack(self, plain: Any) -> Any:
        """Return a packed value, with its tensors."""
        return unpack(plain, self._tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path / MANIFEST} speaks of a tensor {name} it has not.")
        entry = self.manifest.tensors[name]
        return self.elements(f"value/{name}", entry, 0, entry.numel).view(entry.shape).clone()

    def elements(self, key: str, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Return elements of a flattened tensor, out of as many files as they lie in."""
        if entry.parts:
            windows = [(part.window, partial(self._lying, key, entry, part.where))
                       for part in entry.parts]  # fmt: skip
            return from_windows(windows, entry.shape, start, stop)
        return self._lying(key, entry, entry.where, start, stop)

    def _lying(
        self, key: str, entry: TensorEntry, listed: Sequence[Where], start: int, stop: int
    ) -> torch.Tensor:
        found = [
            self._slice(where.file, f"{key}@{where.start}", max(start, where.start) - where.start,
                        min(stop, where.stop) - where.start)
            for where in listed
            if max(start, where.start) < min(stop, where.stop)
        ]  # fmt: skip
        if not found:
            return torch.empty(0, dtype=self.dtype(key, entry))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slice(self, file: int, key: str, start: int, stop: int) -> torch.Tensor:
        tensor: torch.Tensor = self._found(file, key, lambda part: part[start:stop])
        count = stop - start
        if tensor.shape == (count, 2) and tensor.dtype in COMPLEX:
            return torch.view_as_complex(tensor.clone())  # in a file it may lie unaligned
        if tensor.numel() != count:
            raise CheckpointError(f"{self._place(file)}: {key} has too few elements.")
        return tensor

    def _found(self, file: int, key: str, look: Callable[[Any], Any]) -> Any:  # Any: a slice
        try:
            return look(self._open(file).get_slice(key))
        except (self._library.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._place(file)}: {key} can't be read: {error}") from None

    def _open(self, file: int) -> Any:
        if file not in self._files:
            path = self._place(file)
            try:
                self._files[file] = self._library.safe_open(str(path), framework="pt")
            except (self._library.SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} can't be read: {error}") from None
        return self._files[file]

    def _place(self, file: int) -> Path:
        return self.path / self.manifest.folder / self.manifest.files[file].name
