"""The files of a checkpoint: written piece by piece, made to last, and put in place at one stroke.

A checkpoint is a folder. Its manifest names a folder in it, new for every save, in which each rank
has one file. The manifest is replaced last, by renaming, so whoever looks finds the old checkpoint
whole or the new one whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from roundelay.errors import CheckpointError
from roundelay.training.checkpoint._manifest import FOLDER, MANIFEST, REMOVED, File

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
#: What safetensors has no name for is written in pairs of something that it has.
PAIRS = {torch.complex128: torch.float64}
AT_ONCE = 1 << 24  # bytes read, or brought over from a device


class Disk:
    """What a save does to the disk, call by call; `before` is told of each, for tests of faults."""

    before: Callable[[str], None] | None = None

    def did(self, what: str) -> None:
        """Say what is done next."""
        if self.before is not None:
            self.before(what)

    def write(self, file: BinaryIO, data: Any) -> None:  # Any: whatever has bytes
        """Write all of it."""
        self.did("write")
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]  # the system may take less than it is given

    def sync(self, descriptor: int) -> None:
        """Return when it is really on the disk."""
        self.did("sync")
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Have the names in a folder last."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(disk: Disk, path: Path) -> str:
    """Make room in a checkpoint for another one; return the name of its folder."""
    disk.did("mkdir")
    path.mkdir(parents=True, exist_ok=True)
    name = f"parts-{secrets.token_hex(8)}"
    disk.did("mkdir")
    (path / name).mkdir()
    return name


def write_tensors(
    disk: Disk,
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> File:
    """Write tensors as one safetensors file, and return what it should be found as.

    One tensor after the other goes over the processor's memory, so a device's are never all there.
    `kinds` says dtypes and shapes where tensors are made only when they are asked for. Else they
    are flat, and complex ones may become rows of pairs.
    """
    kinds = kinds or {
        key: (PAIRS[tensor.dtype], (*tensor.shape, 2))
        if tensor.dtype in PAIRS
        else (tensor.dtype, tensor.shape)
        for key, tensor in tensors.items()
    }
    # Wide elements first: so all lie at multiples of their size.
    keys = sorted(kinds, key=lambda key: (-kinds[key][0].itemsize, key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key in keys:
        dtype, shape = kinds[key]
        if dtype not in NAMES:
            raise CheckpointError(refused(key, dtype))
        nbytes = math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    checksum, nbytes = hashlib.sha256(), 8 + len(text) + at
    disk.did("open")
    with path.open("xb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            checksum.update(data)
            disk.write(file, data)
        for key in keys:
            flat = tensors[key].detach().reshape(-1)
            for piece in torch.split(flat, AT_ONCE // flat.itemsize):
                plain = piece.resolve_conj().resolve_neg().contiguous()
                elements = plain.cpu().view(torch.uint8).numpy().data
                checksum.update(elements)
                disk.write(file, elements)
        disk.sync(file.fileno())
    if path.stat().st_size != nbytes:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {nbytes} were written.")
    return File(path.name, nbytes, checksum.hexdigest())


def refused(name: str, dtype: torch.dtype) -> str:
    """Say of a tensor that files have no form for its dtype."""
    return (
        f"{name} is of {dtype}, which safetensors has no name for. Convert it, or keep it as "
        f"another dtype by tensor.view(…)."
    )


def check_file(path: Path, file: File) -> None:
    """See that a file is what was written, to the last byte."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    if found != file.nbytes:
        raise CheckpointError(
            f"{path} is truncated: it has {found} of {file.nbytes} bytes."
            if found < file.nbytes
            else f"{path} has {found} bytes in place of {file.nbytes}."
        )
    checksum = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(AT_ONCE):
            checksum.update(data)
    if checksum.hexdigest() != file.sha256:
        raise CheckpointError(f"{path} was changed after it was written: its checksum differs.")


def put_in_place(disk: Disk, path: Path, folder: str, text: bytes) -> None:
    """Make the files of a folder the checkpoint, at one stroke, and drop all that it replaces."""
    disk.sync_folder(path / folder)
    fresh = path / f"{MANIFEST}.{folder}"
    disk.did("open")
    with fresh.open("xb", buffering=0) as file:
        disk.write(file, text)
        disk.sync(file.fileno())
    disk.did("rename")
    fresh.replace(path / MANIFEST)
    disk.sync_folder(path)
    disk.sync_folder(path.parent)
    clear(disk, path, keep=folder)


def clear(disk: Disk, path: Path, *, keep: str | None) -> None:
    """Remove what saves that were replaced, or did not finish, have left; never anything else."""
    leftover = re.compile(re.escape(MANIFEST) + r"\.parts-[0-9a-f]{16}|" + re.escape(REMOVED))
    # Last what says that a checkpoint is being removed.
    for found in sorted(path.iterdir(), key=lambda one: (one.name == REMOVED, one.name)):
        old = FOLDER.fullmatch(found.name) and found.is_dir() and not found.is_symlink()
        if old and found.name != keep:
            disk.did("remove")
            shutil.rmtree(found, ignore_errors=True)
        elif leftover.fullmatch(found.name):
            disk.did("remove")
            found.unlink(missing_ok=True)
