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
from roundelay.torch._devices import create, in_batches
from roundelay.torch._group import ProcessGroup
from roundelay.torch._monitored import also_for_ours
from roundelay.torch_autoload import BACKEND, name_backend

__all__ = ["BACKEND", "ProcessGroup", "create", "register"]

#: What torch has for its own groups only, for ours too.
_FOR_OURS_TOO = {
    "monitored_barrier": also_for_ours(_dist.monitored_barrier),
    "batch_isend_irecv": in_batches(_dist.batch_isend_irecv),
}


def register() -> None:
    """Make `roundelay` known to torch.distributed; again does no harm."""
    name_backend()  # torch may have done so, and older ones refuse a second time
    if BACKEND.upper() not in _dist.Backend._plugins:  # noqa: SLF001 - there is no public way
        raise ImportError(
            f"torch {_torch.__version__} did not take the backend roundelay. Install one that "
            f"does: pip install 'roundelay[torch]'"
        )
    # Source lines in errors are the user's: neither ours nor torch's, nor those of the file from
    # inside which coalesced calls are made when their `with` block ends.
    _core.skip_package(str(_Path(_torch.__file__).parent) + "/")
    _core.skip_package(_contextlib.__file__)
    for name, function in _FOR_OURS_TOO.items():
        setattr(_dist, name, function)
        setattr(_dist.distributed_c10d, name, function)


register()
