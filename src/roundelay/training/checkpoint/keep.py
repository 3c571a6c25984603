"""Which checkpoints belong together, which of them are complete, and how old ones go."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from pathlib import Path

from roundelay.arguments import path_of, whole
from roundelay.errors import CheckpointError, InvalidArgumentError
from roundelay.training.checkpoint._files import Disk, clear
from roundelay.training.checkpoint._manifest import MANIFEST, REMOVED, Manifest, decode

__all__ = ["Series", "latest_checkpoint"]

NUMBER = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in this folder that was saved last; None if there is none."""
    found = [
        (manifest.saved, path)
        for path in _folders(path_of("folder of latest_checkpoint", folder))
        if (manifest := _complete(path)) is not None
    ]
    return max(found)[1] if found else None


class Series:
    """A checkpoint and those beside it whose names differ from its own in the number at the end."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, whole("keep of save, unless None,", keep, 1, 1 << 31)
        match = NUMBER.fullmatch(path.name)
        if match is None:
            raise InvalidArgumentError(
                f"save with keep={keep} needs a path that ends in a number, such as "
                f"{path / 'step-100'}: checkpoints with other numbers beside it are the older "
                f"ones."
            )
        self._name = re.compile(re.escape(match[1]) + "([0-9]+)")

    def drop_older(self, disk: Disk) -> None:
        """Remove all but the last few; only what is complete, and nothing that others have put."""
        try:
            for path in self._older():
                _remove(disk, path)
        except OSError as error:
            warnings.warn(
                f"{self.path} is saved, but an older checkpoint could not be removed: {error}",
                stacklevel=2,
            )

    def _older(self) -> list[Path]:
        found, going = [], []
        for path in _folders(self.path.parent):
            number = self._name.fullmatch(path.name)
            if number is None or path.name == self.path.name:
                continue
            manifest = _complete(path)
            if manifest is not None:
                found.append((manifest.saved, int(number[1]), path))
            elif (path / REMOVED).is_file() and not (path / MANIFEST).exists():
                going.append(path)  # who was removing it did not come to the end
        found.sort(reverse=True)
        return [*going, *(path for _, _, path in found[self.keep - 1 :])]


def _folders(folder: Path) -> list[Path]:
    try:
        return [one for one in sorted(folder.iterdir()) if one.is_dir() and not one.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}.") from None


def _complete(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint whose files are all there, in full length."""
    try:
        manifest = decode((path / MANIFEST).read_bytes(), path / MANIFEST)
        files = [(path / manifest.folder / file.name, file.nbytes) for file in manifest.files]
        return manifest if all(one.stat().st_size == nbytes for one, nbytes in files) else None
    except (OSError, CheckpointError):
        return None


def _remove(disk: Disk, path: Path) -> None:
    """Have it be no checkpoint any more, at one stroke, and then remove what we wrote."""
    with contextlib.suppress(FileNotFoundError):
        disk.did("rename")
        (path / MANIFEST).replace(path / REMOVED)
    clear(disk, path, keep=None)
    disk.did("remove")
    with contextlib.suppress(OSError):
        path.rmdir()  # unless somebody else has put something there
