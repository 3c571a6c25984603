"""`import roundelay.horovod.keras as hvd`, in the place of `import horovod.keras as hvd`."""

from roundelay.fronts.horovod.keras import *  # noqa: F403 - all that it has, and nothing else
