"""`import roundelay.horovod.torch as hvd`, in the place of `import horovod.torch as hvd`."""

from roundelay.errors import MissingPackageError as _MissingPackageError

try:
    from roundelay.fronts.horovod.torch import *  # noqa: F403 - all that it has
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise _MissingPackageError("roundelay.horovod.torch", "torch", "torch") from None
