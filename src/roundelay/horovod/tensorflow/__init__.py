"""`import roundelay.horovod.tensorflow as hvd`: Horovod's functions for TensorFlow."""

from roundelay.fronts.horovod.tensorflow import *  # noqa: F403 - all that it has, and nothing else
