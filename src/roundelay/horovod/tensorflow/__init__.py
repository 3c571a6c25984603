"""`import roundelay.horovod.tensorflow as hvd`: Horovod's functions for TensorFlow."""

from roundelay.errors import MissingPackageError as _MissingPackageError

try:
    from roundelay.fronts.horovod.tensorflow import *  # noqa: F403 - all that it has
except ModuleNotFoundError as _error:
    if _error.name != "tensorflow":
        raise
    raise _MissingPackageError("roundelay.horovod.tensorflow", "tensorflow", "tensorflow") from None
