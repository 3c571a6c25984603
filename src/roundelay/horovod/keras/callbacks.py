"""`roundelay.horovod.keras.callbacks`."""

from roundelay.fronts.horovod.keras.callbacks import *  # noqa: F403 - all that it has
