"""A `torch.distributed` backend named `roundelay`, for CPU tensors.

Torch knows its name wherever Roundelay is installed (`torch_autoload.py`), so

    dist.init_process_group("roundelay")

is all that changes in a script that was written for gloo. Where that is turned off, by
TORCH_DEVICE_BACKEND_AUTOLOAD=0, `import roundelay.torch` registers it.
"""

from __future__ import annotations

import contextlib as _contextlib
from pathlib import Path as _Path

from roundelay.errors import MissingPackageError as _MissingPackageError

try:
    import torch as _torch
    import torch.distributed as _dist
except ModuleNotFoundError as _error:
    if _error.name is None or _error.name.partition(".")[0] != "torch":
        raise
    raise _MissingPackageError("roundelay.torch", "torch") from None

if not _dist.is_available():
    raise ImportError(
        "roundelay.torch is a backend of torch.distributed, which this torch was built without. "
        "Install one that has it: pip install 'roundelay[torch]'"
    )

from roundelay import _core
from roundelay.torch._group import ProcessGroup, create
from roundelay.torch._monitored import also_for_ours

__all__ = ["BACKEND", "ProcessGroup", "create", "register"]

BACKEND = "roundelay"


def register() -> None:
    """Make `roundelay` known to torch.distributed; again does no harm."""
    named = _dist.Backend._plugins.get(BACKEND.upper())  # noqa: SLF001 - there is no public way
    if named is not None and named.creator_fn is create:
        return
    # Source lines in errors are the user's: neither ours nor torch's, nor those of the file from
    # inside which coalesced calls are made when their `with` block ends.
    _core.skip_package(str(_Path(_torch.__file__).parent) + "/")
    _core.skip_package(_contextlib.__file__)
    _dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    _dist.monitored_barrier = also_for_ours(_dist.monitored_barrier)
    _dist.distributed_c10d.monitored_barrier = _dist.monitored_barrier


register()
