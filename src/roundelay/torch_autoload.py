"""Tells torch the name of our backend while torch is imported; all else waits until it is used.

Torch, 2.5 and later, calls `name_backend` at the end of its own import, in every program where
Roundelay is installed. So it costs next to nothing, imports nothing, and never raises.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

__all__ = ["name_backend"]

BACKEND = "roundelay"


def name_backend() -> None:
    """Make `roundelay` known to torch.distributed, where torch has that."""
    with contextlib.suppress(Exception):
        known: Any = sys.modules["torch.distributed"].Backend  # torch is optional: without types
        if BACKEND.upper() not in known._plugins:  # noqa: SLF001 - there is no public way to ask
            known.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(*given: Any) -> Any:
    """Make a process group; the first one brings the backend in."""
    return import_module(f"{__package__}.torch").create(*given)
