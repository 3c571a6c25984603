"""DeepSpeed's shared-memory all-reduce for CPUs as somebody to measure against.

Its sources come with the Python package; torch builds them at the first use, with DeepSpeed's own
flags, and keeps the result. DeepSpeed itself is not imported.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roundelay.bench.workload import Buffers, Call, Workload
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError

__all__ = ["DeepSpeedPeer", "check_deepspeed"]

MISSING = (
    "--against deepspeed needs {what}. Install what builds its kernel: pip install torch ninja, "
    "then pip install --no-deps --no-build-isolation deepspeed; and a C++ compiler"
)
FLAGS = ["-O2", "-fopenmp"]
SHARED = Path("/dev/shm")  # noqa: S108 - where its segments lie


def check_deepspeed() -> None:
    """Refuse to start where its sources, or what builds them, are not installed."""
    for module in ("torch", "deepspeed"):
        if find_spec(module) is None:
            raise InvalidArgumentError(MISSING.format(what=f"the Python package {module}"))
    if not _sources().is_dir():
        raise InvalidArgumentError(MISSING.format(what="a deepspeed that brings its C++ sources"))
    for tool in ("ninja", os.environ.get("CXX", "c++")):
        if shutil.which(tool, path=_folders()) is None:
            raise InvalidArgumentError(MISSING.format(what=f"the program {tool}"))


def _sources() -> Path:
    spec = find_spec("deepspeed")
    return Path(spec.origin if spec and spec.origin else "").parent / "ops" / "csrc" / "cpu"


def _folders() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class DeepSpeedPeer:
    """Its kernel on the ranks that are ours; `job` makes the names of its segments its own."""

    def __init__(self, comm: Communicator, job: str) -> None:
        self._torch: Any = importlib.import_module("torch")  # optional, so without types
        os.environ["PATH"] = _folders()  # where torch looks for ninja
        # It reads all it knows of its ranks from here; the address only names segments.
        os.environ.update(LOCAL_SIZE=str(comm.size), MASTER_ADDR="roundelay", MASTER_PORT=job)
        _build().initialize(comm.size, comm.rank)
        comm.barrier()
        # All have mapped all. It would leave the names behind for good.
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_roundelay_{job}_{comm.rank}"
        (SHARED / name).unlink(missing_ok=True)

    @property
    def version(self) -> str:
        """Name the package whose sources were built."""
        return f"DeepSpeed {metadata.version('deepspeed')}"

    def call(self, work: Workload, buffers: Buffers) -> Call | None:
        """Return its call on these buffers, None where it has none: it only adds floats up."""
        if (work.collective, work.op) != ("all_reduce", "sum"):
            return None
        if work.dtype not in ("float32", "float16"):
            return None
        tensor = self._torch.from_numpy(buffers.input)
        return partial(self._torch.ops.deepspeed.inference_all_reduce_.default, tensor)


def _build() -> Any:
    extension: Any = importlib.import_module("torch.utils.cpp_extension")
    root = _sources()
    return extension.load(
        name="deepspeed_shm_comm",
        sources=[str(root / "comm" / name) for name in ("shm_interface.cpp", "shm.cpp")],
        extra_include_paths=[str(root / "includes")],
        extra_cflags=FLAGS,
        extra_ldflags=FLAGS[1:],
    )
