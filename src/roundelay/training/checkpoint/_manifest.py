"""The manifest of a checkpoint: which tensor lies where, and everything that is no tensor."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import msgspec

from roundelay.errors import CheckpointError
from roundelay.training.checkpoint.window import Window

MANIFEST = "checkpoint.json"
REMOVED = f"{MANIFEST}.removed"  # what it is called while its checkpoint is being removed
FORMAT = "roundelay checkpoint 1"
FOLDER = re.compile(r"parts-[0-9a-f]{16}")
FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")
MOST_BYTES = 1 << 30


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file, and how to tell that it is whole."""

    name: str
    nbytes: int
    sha256: str


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements `start` to `stop` of a flattened tensor, under the key `name@start` in a file."""

    file: int
    start: int
    stop: int


class TensorPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks of a mesh had of a tensor: `spans` of one dim, and where these lie, flattened."""

    dim: int
    spans: list[tuple[int, int]]
    where: list[Where]

    @property
    def window(self) -> Window:
        """What it is of the whole tensor."""
        return Window(self.dim, tuple((start, stop) for start, stop in self.spans))


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor: where it lies, or where its parts do."""

    shape: list[int]
    where: list[Where]
    parts: list[TensorPart] = []

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group of the optimizer."""

    names: list[str]
    options: dict[str, Any]


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All optimizers: their classes and groups. Their state is with the parameters."""

    kind: str
    groups: list[Group]
    state: list[Any] = []  # of each, what is of no parameter


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a checkpoint but its tensors; values as `_checkpoint_values` packs them."""

    format: str
    sha256: str  # of this very text, with nothing between these quotes
    ranks: int
    strategy: str
    steps: int
    saved: float  # when, in seconds since 1970
    folder: str
    files: list[File]
    parameters: dict[str, TensorEntry]
    aliases: dict[str, str]  # other names of shared parameters
    buffers: dict[str, TensorEntry]
    elements: dict[str, dict[str, TensorEntry]]  # optimizer state, by parameter
    whole: dict[str, dict[str, Any]]
    optimizers: list[Optimizer]  # in the order of prepare; none where only weights were saved
    modules: dict[str, Any]  # what get_extra_state() gave
    tensors: dict[str, TensorEntry]  # that packed values speak of
    random: list[Any]  # by rank; none where only weights were saved
    scaler: dict[str, float] | None
    scheduler: Any
    extra: Any


_read = msgspec.json.Decoder(Manifest).decode


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its own checksum in it."""
    checksum = hashlib.sha256(_text(manifest)).hexdigest()
    return _text(msgspec.structs.replace(manifest, sha256=checksum))


def decode(text: bytes, path: object) -> Manifest:
    """Return the manifest that a text holds, or say what is wrong with it."""
    if len(text) > MOST_BYTES:
        raise CheckpointError(f"{path} has {len(text)} bytes, more than any manifest.")
    try:
        manifest = _read(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is truncated, or no manifest of a checkpoint: {error}"
        ) from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} is a {manifest.format!r}; this version reads {FORMAT!r}.")
    bare = text.replace(manifest.sha256.encode(), b"", 1)
    if manifest.sha256 != hashlib.sha256(bare).hexdigest():
        raise CheckpointError(f"{path} was changed after it was written: its checksum differs.")
    _check(manifest, path)
    return manifest


def _text(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest) + b"\n"


def _check(manifest: Manifest, path: object) -> None:
    """See that nothing lies outside the checkpoint and every tensor is there whole, once."""
    names = [file.name for file in manifest.files]
    if not FOLDER.fullmatch(manifest.folder) or not all(FILE.fullmatch(name) for name in names):
        raise CheckpointError(f"{path} names files that no checkpoint has.")
    groups = [manifest.parameters, manifest.buffers, manifest.tensors, *manifest.elements.values()]
    for entries in groups:
        for name, entry in entries.items():
            if any(length < 0 for length in entry.shape) or not _divides(entry):
                raise CheckpointError(f"{path} does not say where all of {name} lies.")
            if not entry.parts:
                _check_where(path, name, entry.where, entry.numel, len(names))
            for part in entry.parts:
                numel = math.prod(part.window.shape(entry.shape))
                _check_where(path, name, part.where, numel, len(names))


def _divides(entry: TensorEntry) -> bool:
    """Tell whether the parts of a tensor, if it has some, have each element once."""
    if not entry.parts:
        return True
    dim, at = entry.parts[0].dim, 0
    if entry.where or not 0 <= dim < len(entry.shape):
        return False
    for start, stop in sorted(span for part in entry.parts for span in part.spans):
        if start != at or stop < at:
            return False
        at = stop
    return at == entry.shape[dim] and all(part.dim == dim for part in entry.parts)


def _check_where(path: object, name: str, listed: list[Where], numel: int, files: int) -> None:
    at = 0
    for where in listed:
        if where.start != at or where.stop < at or not 0 <= where.file < files:
            raise CheckpointError(f"{path} does not say where all of {name} lies.")
        at = where.stop
    if at != numel:
        raise CheckpointError(f"{path} has {at} elements of {name}, not {numel}.")


def new(**fields: Any) -> Manifest:  # Any: the fields of a manifest
    """Return a manifest of the present format, which names no files so far."""
    nothing: dict[str, Any] = {
        "folder": "", "files": [], "elements": {}, "whole": {}, "tensors": {}, "random": [],
        "modules": {}, "scheduler": None, "extra": None,
    }  # fmt: skip
    return Manifest(format=FORMAT, sha256="", **{**nothing, **fields})
