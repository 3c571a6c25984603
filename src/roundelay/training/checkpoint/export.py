"""`rd.export`: a checkpoint as one safetensors file, or in the form of torch's own checkpoints."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import torch

from roundelay.arguments import path_of
from roundelay.errors import CheckpointError, InvalidArgumentError, UnknownNameError
from roundelay.training.checkpoint._files import PAIRS, Disk, write_tensors
from roundelay.training.checkpoint.read_checkpoint import Checkpoint, read_checkpoint

__all__ = ["FORMS", "export"]

SUFFIX = ".safetensors"
DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    form: str = "safetensors",
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Write a checkpoint once more, for others to read, and return where it is.

    The form "safetensors" is one file with the model's weights, one tensor after the other, so that
    any model can pass; tied weights are in it once, by their first name, as Hugging Face has it.
    "dcp" is a folder that torch.distributed.checkpoint loads: "model" and, unless weights only were
    saved, "optimizer", by names of parameters. Floating-point weights are written in `dtype`.
    """
    if str(form) not in FORMS:
        raise UnknownNameError("forms of export", str(form), FORMS)
    where = path_of("out of export", out)
    if form == "safetensors" and where.suffix != SUFFIX:
        raise InvalidArgumentError(
            f"export writes one file whose name ends in {SUFFIX}, not {where}. Other forms: "
            f"form={', '.join(map(repr, FORMS))}."
        )
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UnknownNameError("dtypes of export", dtype, DTYPES)
        dtype = DTYPES[dtype]
    checkpoint = read_checkpoint(path, dtype=dtype)
    try:
        FORMS[form](checkpoint, where)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be exported: {error.strerror or error}: {error.filename or where}"
        ) from None
    return where


def _safetensors(checkpoint: Checkpoint, where: Path) -> None:
    weights = checkpoint.weights
    kinds = {name: (weights.dtype(name), weights.entry(name)[1].shape)
             for name in weights.tensors()}  # fmt: skip
    for name, (kind, _) in kinds.items():
        if kind in PAIRS:
            raise CheckpointError(
                f"{name} is of {kind}, which safetensors has no name for. Take form='dcp'."
            )
    # What safetensors' own save_model says of names that it has left out.
    metadata = {"format": "pt", **weights.aliases}
    fresh = where.with_name(f"{where.name}.{secrets.token_hex(8)}")
    try:
        write_tensors(Disk(), fresh, weights, kinds=kinds, metadata=metadata)
        fresh.replace(where)
    finally:
        fresh.unlink(missing_ok=True)


def _dcp(checkpoint: Checkpoint, where: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415 - slow
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - likewise

    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise InvalidArgumentError(f"export in the form dcp needs a new folder; {where} is there.")
    state: dict[str, Any] = {"model": checkpoint.state_dict()}
    own = checkpoint.optimizers()
    for number, one in enumerate(own):
        name = "optimizer" if len(own) == 1 else f"optimizer.{number}"
        state[name] = {"state": one["state"], "param_groups": one["param_groups"]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # which is intended
        save(state, storage_writer=FileSystemWriter(where), no_dist=True)


FORMS = {"safetensors": _safetensors, "dcp": _dcp}
