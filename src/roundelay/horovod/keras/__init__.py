"""`import roundelay.horovod.keras as hvd`, in the place of `import horovod.keras as hvd`."""

from roundelay.errors import MissingPackageError as _MissingPackageError

try:
    from roundelay.fronts.horovod.keras import *  # noqa: F403 - all that it has
except ModuleNotFoundError as _error:
    if _error.name != "keras":
        raise
    raise _MissingPackageError("roundelay.horovod.keras", "keras", "keras") from None
