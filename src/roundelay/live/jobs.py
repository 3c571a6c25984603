"""Jobs of this user that run on this host, found by the memory that their ranks share.

It is a memfd: nothing of it has a name but the descriptors of those who hold it. The kernel shows
these to the same user alone, and the memory is mapped to be read only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from roundelay import _core
from roundelay.errors import OtherVersionError, RoundelayError

__all__ = ["LiveJob", "command_of", "find_jobs"]

MEMFD = "/memfd:roundelay "
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job: its memory, by where a process holds it, and the processes that do."""

    inode: tuple[int, int]
    place: str  # /proc/PID/fd/N
    pids: tuple[int, ...]

    def world(self) -> _core.World:
        """Map the job's memory, to be read only."""
        try:
            fd = os.open(self.place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RoundelayError(f"Process {self.pids[0]} has ended, or is not yours.") from error
        try:
            return _core.World.look_on(fd)
        except _core.OtherVersion as error:
            raise OtherVersionError(
                f"Process {self.pids[0]} runs another version of roundelay: its memory has "
                f"{error}. Look with its own: {_python_of(self.pids[0])} -m roundelay top "
                f"{self.number}"
            ) from error
        except RuntimeError as error:
            raise RoundelayError(f"Process {self.pids[0]}: {error}.") from error
        finally:
            os.close(fd)

    @property
    def number(self) -> int:
        """By what to choose it: a number that no other job has at the time."""
        return self.inode[1]

    def runs(self) -> bool:
        """Tell whether any rank is still there; of another version nobody can tell."""
        try:
            world = self.world()
        except OtherVersionError:
            return True
        except RoundelayError:
            return False
        lives = {_core.LIVES[world.life(rank)] for rank in range(world.size)}
        return "alive" in lives

    @property
    def command(self) -> str:
        """What its first process was started with."""
        return command_of(self.pids[0])


def find_jobs() -> list[LiveJob]:
    """Return the jobs of this user in which ranks are at work, by the number of their process."""
    found: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            for inode, place in _held_by(entry):
                found.setdefault(inode, []).append((int(entry.name), place))
    jobs = []
    for inode, holders in found.items():
        holders.sort()
        pids = tuple(dict.fromkeys(pid for pid, _ in holders))
        jobs.append(LiveJob(inode, holders[0][1], pids))
    return sorted((job for job in jobs if job.runs()), key=lambda job: job.pids)


def _held_by(process: Path) -> list[tuple[tuple[int, int], str]]:
    """Return the memory of jobs that a process holds; nothing of another user's."""
    found = []
    try:
        if process.stat().st_uid != os.geteuid():
            return []
        for place in (process / "fd").iterdir():
            try:
                if str(place.readlink()).startswith(MEMFD):
                    seen = place.stat()
                    if seen.st_uid == os.geteuid():
                        found.append(((seen.st_dev, seen.st_ino), str(place)))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return []  # ended meanwhile, or not to be looked at
    return found


def command_of(pid: int) -> str:
    """Return the words that a process was started with; nothing if it has ended."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()[:4096].split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words if word)


def _python_of(pid: int) -> str:
    return next(iter(command_of(pid).split()), "python")
