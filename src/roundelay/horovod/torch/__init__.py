"""`import roundelay.horovod.torch as hvd`, in the place of `import horovod.torch as hvd`."""

from roundelay.fronts.horovod.torch import *  # noqa: F403 - all that it has, and nothing else
