"""Descriptors: every rank holds a pipe of every other, which is more than a process usually may."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["allow_descriptors"]


def allow_descriptors(count: int) -> None:
    """Let this process open so many more, as far as it may allow that to itself."""
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if usual == resource.RLIM_INFINITY:
        return
    wanted = len(list(Path("/proc/self/fd").iterdir())) + count
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if usual < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
