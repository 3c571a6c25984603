"""Reading a checkpoint: any elements of any tensor, whichever ranks wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roundelay.errors import CheckpointError, MissingPackageError
from roundelay.training._checkpoint_format import MANIFEST, Entry, Manifest
from roundelay.training._checkpoint_values import unpack

__all__ = ["Reader", "need_safetensors"]


def need_safetensors() -> Any:  # Any: a module
    """Return the library that reads safetensors, or say how to get it."""
    try:
        import safetensors  # noqa: PLC0415 - an extra
    except ImportError:
        raise MissingPackageError("Reading checkpoints", "safetensors") from None
    return safetensors


class Reader:
    """One checkpoint on the disk; what strategies know as `Saved`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[int, Any] = {}
        self._library = need_safetensors()

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        own = self.manifest.aliases.get(name, name)
        return self.elements(f"parameter/{own}", self.manifest.parameters[own], start, stop)

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat."""
        own = self.manifest.aliases.get(name, name)
        return {
            key: self.elements(f"state.{key}/{own}", entry, start, stop)
            for key, entry in self.manifest.elements.get(own, {}).items()
        }

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter."""
        own = self.manifest.aliases.get(name, name)
        return {key: self.unpack(value) for key, value in self.manifest.whole.get(own, {}).items()}

    def buffer(self, name: str) -> torch.Tensor:
        """Return one buffer."""
        entry = self.manifest.buffers[name]
        return self.elements(f"buffer/{name}", entry, 0, entry.numel).view(entry.shape)

    def unpack(self, plain: Any) -> Any:
        """Return a packed value, with its tensors."""
        return unpack(plain, self._tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path / MANIFEST} speaks of a tensor {name} it has not.")
        entry = self.manifest.tensors[name]
        return self.elements(f"value/{name}", entry, 0, entry.numel).view(entry.shape).clone()

    def elements(self, key: str, entry: Entry, start: int, stop: int) -> torch.Tensor:
        """Return elements of a flattened tensor, out of as many files as they lie in."""
        found = [
            self._slice(where.file, f"{key}@{where.start}", max(start, where.start) - where.start,
                        min(stop, where.stop) - where.start)
            for where in entry.where
            if max(start, where.start) < min(stop, where.stop)
        ]  # fmt: skip
        if not found:
            return torch.empty(0)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slice(self, file: int, key: str, start: int, stop: int) -> torch.Tensor:
        name = self.manifest.files[file].name
        path = self.path / self.manifest.folder / name
        try:
            if file not in self._files:
                self._files[file] = self._library.safe_open(str(path), framework="pt")
            tensor: torch.Tensor = self._files[file].get_slice(key)[start:stop]
        except (self._library.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {key} can't be read: {error}") from None
        if tensor.numel() != stop - start:
            raise CheckpointError(f"{path}: {key} has too few elements.")
        return tensor
