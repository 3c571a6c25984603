"""What a run might leave behind on a host, looked for before and after."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

STARTING_S = 5.0  # that a job may take to start
RENDEZVOUS = re.compile(r"roundelay-(\d+)-[0-9a-f]{24}")


def traces() -> dict[str, set[str]]:
    """Return by kind what is there now; other programs' names are not ours to count."""
    return {
        "segments in /dev/shm": {name for name in _names("/dev/shm") if "roundelay" in name},  # noqa: S108
        "processes": _children(os.getpid()),
        "rendezvous sockets": {str(path) for path in rendezvous_directories(os.environ)},
        "open descriptors": _descriptors(),
    }


def left_behind(before: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return what is there since then; rendezvous of other jobs, which start just now, soon go."""
    until = time.monotonic() + STARTING_S
    while True:
        left = {kind: sorted(found - before[kind]) for kind, found in traces().items()}
        if not left["rendezvous sockets"] or time.monotonic() > until:
            return left
        time.sleep(0.05)


def rendezvous_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders in which ranks of this user may have their rendezvous."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return [*([Path(runtime)] if runtime else []), Path(tempfile.gettempdir())]


def rendezvous_directories(environment: Mapping[str, str]) -> list[Path]:
    """Return this user's directories: of jobs that start this moment, or died starting."""
    return [
        folder / name
        for folder in rendezvous_folders(environment)
        for name in _names(folder)
        if (match := RENDEZVOUS.fullmatch(name)) and int(match[1]) == os.geteuid()
    ]


def _names(folder: Path | str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []


def _children(parent: int) -> set[str]:
    children = set()
    for name in filter(str.isdigit, _names("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text(encoding="latin-1")
        except OSError:
            continue
        if int(fields.rpartition(")")[2].split()[1]) == parent:
            children.add(name)
    return children


def _descriptors() -> set[str]:
    descriptors = set()
    for name in _names("/proc/self/fd"):
        try:
            descriptors.add(f"{name} {Path('/proc/self/fd', name).readlink()}")
        except OSError:  # the one that listed the folder
            continue
    return descriptors
