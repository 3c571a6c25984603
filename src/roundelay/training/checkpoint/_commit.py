"""One save: every rank writes its file, and the first puts all of them in place at one stroke."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from roundelay.communicator import Communicator
from roundelay.training.checkpoint._files import Disk, make_folder, put_in_place
from roundelay.training.checkpoint._manifest import MANIFEST, Manifest, encode
from roundelay.training.checkpoint._write import Sheet, gather_up, write_down
from roundelay.training.checkpoint.keep import Series
from roundelay.training.checkpoint.saving import together


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
