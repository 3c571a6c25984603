"""What a run might leave behind on a host, looked for before and after."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Traces", "left_behind", "rendezvous_directories", "rendezvous_folders"]

STARTING_S = 5.0  # that a job may take to start
RENDEZVOUS = re.compile(r"roundelay-(\d+)-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Traces:
    """Names in /dev/shm, rendezvous folders, children and open descriptors at one moment."""

    shared_memory: frozenset[str]
    places: frozenset[str]
    processes: frozenset[int]
    descriptors: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        """Look at this process and this host; other programs' names are not ours to count."""
        return cls(
            frozenset(name for name in _names(Path("/dev/shm")) if "roundelay" in name),  # noqa: S108
            frozenset(str(place) for place in rendezvous_directories(os.environ)),
            frozenset(_children(os.getpid())),
            frozenset(_descriptors()),
        )

    def since(self, before: Traces) -> dict[str, list[str]]:
        """Return what was not there before, by kind; every kind is named, also when it has none."""
        pairs: dict[str, tuple[frozenset[str], frozenset[str]]] = {
            "segments in /dev/shm": (self.shared_memory, before.shared_memory),
            "processes": (_texts(self.processes), _texts(before.processes)),
            "rendezvous sockets": (self.places, before.places),
            "open descriptors": (self.descriptors, before.descriptors),
        }
        return {kind: sorted(after - earlier) for kind, (after, earlier) in pairs.items()}


def left_behind(before: Traces) -> dict[str, list[str]]:
    """Return what is there since then; rendezvous of other jobs, which start just now, soon go."""
    until = time.monotonic() + STARTING_S
    found = Traces.now().since(before)
    while found["rendezvous sockets"] and time.monotonic() < until:
        time.sleep(0.05)
        found = Traces.now().since(before)
    return found


def rendezvous_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders in which ranks of this user may have their rendezvous."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return [*([Path(runtime)] if runtime else []), Path(tempfile.gettempdir())]


def rendezvous_directories(environment: Mapping[str, str]) -> list[Path]:
    """Return this user's rendezvous folders: of jobs that start this moment, or died starting."""
    found = []
    for folder in rendezvous_folders(environment):
        for name in _names(folder):
            match = RENDEZVOUS.fullmatch(name)
            if match and int(match[1]) == os.geteuid():
                found.append(folder / name)
    return found


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _children(parent: int) -> list[int]:
    found = []
    for name in _names(Path("/proc")):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text(encoding="latin-1")
            except OSError:
                continue
            if int(fields.rpartition(")")[2].split()[1]) == parent:
                found.append(int(name))
    return found


def _descriptors() -> list[str]:
    found = []
    for name in _names(Path("/proc/self/fd")):
        try:
            target = Path("/proc/self/fd", name).readlink()
        except OSError:  # the one that listed the folder
            continue
        found.append(f"{name} {target}")
    return found


def _texts(numbers: frozenset[int]) -> frozenset[str]:
    return frozenset(map(str, numbers))
