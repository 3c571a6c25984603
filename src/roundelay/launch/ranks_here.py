"""How many ranks a host should have, by number or by a word: one per core, one per GPU."""

from __future__ import annotations

import ctypes

from roundelay import _core
from roundelay.errors import InvalidArgumentError
from roundelay.launch.local import MOST_RANKS

__all__ = ["gpu_count", "ranks_here"]


def ranks_here(word: str) -> int:
    """Read a number, cpu, gpu, or auto: gpu where there is one, else cpu."""
    gpus = gpu_count() if word in ("auto", "gpu") else 0
    if gpus:
        return gpus
    if word == "gpu":
        raise InvalidArgumentError(
            "'gpu' is one rank per GPU, and none is seen here. Write a number, or cpu; or see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES."
        )
    if word in ("auto", "cpu"):
        return _core.available_cores()
    if not word.isascii() or not word.isdigit():
        raise InvalidArgumentError(
            f"{word[:60]!r} is not a number of ranks; write 4, auto, cpu or gpu."
        )
    if not 1 <= int(word[:9]) <= MOST_RANKS:
        raise InvalidArgumentError(f"{word[:60]!r}: a job has 1 to {MOST_RANKS} ranks.")
    return int(word)


def gpu_count() -> int:
    """Return the number of GPUs, less those that CUDA_VISIBLE_DEVICES hides; 0 without a driver.

    NVIDIA's driver is asked: at once, and without torch.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
