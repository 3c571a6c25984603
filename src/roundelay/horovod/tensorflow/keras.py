"""`import roundelay.horovod.tensorflow.keras as hvd`: the same as `roundelay.horovod.keras`."""

from roundelay.fronts.horovod.keras import *  # noqa: F403 - all that it has, and nothing else
