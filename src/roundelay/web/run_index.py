"""Recorded runs of one folder, each by an id: what a request names is looked up, never opened."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from roundelay.errors import UnknownNameError
from roundelay.records import RunRecord, read_run

__all__ = ["RunFolder", "RunIndex"]

MOST_RUNS = 200  # listed, the newest
DEEP = 2  # folders inside folders
FILES = "rank-*.rdtrace"
KEPT = 2  # runs that stay in memory


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder with the files of ranks."""

    id: str
    name: str  # of the folder, below the one that is listed
    place: Path
    files: int
    changed: float  # when the newest was written, in seconds since 1970


class RunIndex:
    """The runs in a folder, and in folders inside it; links are not followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._read: dict[tuple[str, float], RunRecord] = {}

    def runs(self) -> list[RunFolder]:
        """List the runs that are there now, the newest first."""
        found = [one for place in self._places() if (one := self._look(place)) is not None]
        return sorted(found, key=lambda one: (-one.changed, one.name))[:MOST_RUNS]

    def run(self, wanted: str) -> RunRecord:
        """Read a run of the list."""
        known = {one.id: one for one in self.runs()}
        if wanted not in known:
            raise UnknownNameError("runs", wanted, known)
        found = known[wanted]
        key = found.id, found.changed
        with self._lock:
            if key not in self._read:
                while len(self._read) >= KEPT:
                    self._read.pop(next(iter(self._read)))
                self._read[key] = read_run(found.place, links=False)
            return self._read[key]

    def _places(self) -> list[Path]:
        level, found = [self._folder], [self._folder]
        for _ in range(DEEP):
            level = [path for place in level for path in _inside(place)]
            found += level
        return found

    def _look(self, place: Path) -> RunFolder | None:
        try:
            times = [path.stat().st_mtime for path in place.glob(FILES) if not path.is_symlink()]
        except OSError:  # gone meanwhile
            return None
        if not times:
            return None
        name = "." if place == self._folder else str(place.relative_to(self._folder))
        number = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        return RunFolder(number, name, place, len(times), max(times))


def _inside(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # gone, or another user's
        return []
