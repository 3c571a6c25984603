"""What the kernel lets this process have: cores, memory, limits, read where the kernel says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_quota", "memory_available", "memory_limit_left"]

CGROUPS = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Return how many cores' worth of time the control groups allow; None: as many as there are."""
    found = []
    for folder in _groups("cpu"):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":  # noqa: PLR2004 - quota and period
            found.append(int(words[0]) / int(words[1]))
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            found.append(int(quota[0]) / int(period[0]))
    return min(found, default=None)


def memory_limit_left() -> int | None:
    """Return how many bytes the control groups still allow; None where they set no limit."""
    found = []
    for folder in _groups("memory"):
        for most, used in (("memory.max", "memory.current"),
                           ("memory.limit_in_bytes", "memory.usage_in_bytes")):  # fmt: skip
            limit, now = _words(folder / most), _words(folder / used)
            # Version 1 writes "no limit" as a number near 2 to the 63rd.
            if limit and now and limit[0] != "max" and int(limit[0]) < 1 << 62:
                found.append(int(limit[0]) - int(now[0]))
    return min(found, default=None)


def memory_available() -> int | None:
    """Return the bytes that the kernel could give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from the innermost to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = CGROUPS / names if names else CGROUPS
        own = Path(os.path.normpath(f"{base}/{path}"))
        for folder in (own, *own.parents):
            if folder == base or base in folder.parents:
                yield folder


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []
