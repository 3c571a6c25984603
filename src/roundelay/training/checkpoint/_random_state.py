"""Where random numbers stand on one rank: Python's, numpy's and torch's, devices too."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:  # Any: numbers and tensors
    """Return the state of every generator that programs use without asking."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - its state is wanted
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            str(kind),
            torch.tensor(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    """Go on from there; devices that were not there before keep what they have."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002 - likewise
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def seed_from(state: dict[str, Any], rank: int) -> None:
    """Seed a rank that was not there when the checkpoint was written, the same way every time."""
    text = bytes(state["torch"].numpy()) + rank.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - likewise
    torch.manual_seed(seed)  # devices too
