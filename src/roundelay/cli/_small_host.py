"""A host without room, made in a process of its own: `python -m roundelay.cli._small_host`.

Writes one `Shown` a line, as JSON: ranks at work while /dev/shm is full, the error of ranks that
can't have their memory at the start, and the error of an array that is larger than the arena.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import msgspec

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SHM = Path("/dev/shm")  # noqa: S108 - the very thing to be filled
SHM_BYTES = 64 * 1024
RANKS, COUNT = 4, 1 << 21
LITTLE = 1 << 20  # bytes of address space beyond what is in use


class Shown(msgspec.Struct, frozen=True):
    """One try: what was done, and what came of it; `error` names a type or is empty."""

    what: str
    said: str
    error: str = ""


def full_shm() -> Shown:
    """Reduce while /dev/shm is 64 KiB and full, seen by this process and its children only."""
    what = f"{SHM} of {SHM_BYTES >> 10} KiB, full to the last byte"
    try:
        _own_shm()
    except OSError as error:
        return Shown(what, f"can't be made here ({error.strerror}): this kernel lets nobody mount.")
    written = _fill()
    said = _reduce()
    return Shown(f"{what} ({written} bytes written)", said)


def _own_shm() -> None:
    """Mount a small one over the real one, in a namespace of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    _do(libc.unshare(CLONE_NEWNS if uid == 0 else CLONE_NEWNS | CLONE_NEWUSER))
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    _do(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    _do(libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", 0, f"size={SHM_BYTES}".encode()))


def _do(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _fill() -> int:
    written = 0
    with (SHM / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError:
            return written


def _reduce() -> str:
    # Not before: numpy starts threads, and a process that has threads can't leave its namespaces.
    import numpy as np  # noqa: PLC0415

    from roundelay.communicator import Communicator  # noqa: PLC0415
    from roundelay.launch import run  # noqa: PLC0415

    def reduce(comm: Communicator) -> bool:
        total = comm.all_reduce(np.full(COUNT, comm.rank + 1, np.float32))
        return bool((total == sum(range(RANKS + 1))).all())

    right = sum(run(reduce, RANKS))
    return f"{right} of {RANKS} ranks all-reduced {4 * COUNT >> 20} MiB, and got it right"


def little_memory() -> Shown:
    """Try to start a job with too little address space."""
    from roundelay.launch import run  # noqa: PLC0415 - likewise

    usual = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LITTLE
    resource.setrlimit(resource.RLIMIT_AS, (limit, usual[1]))
    what = f"a job of {RANKS} ranks with {LITTLE >> 20} MiB of address space left (ulimit -v)"
    try:
        run(lambda comm: comm.rank, RANKS)
    except MemoryError as error:
        return Shown(what, str(error), type(error).__name__)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    return Shown(what, "started all the same")


def large_array() -> Shown:
    """Ask for an array that no arena holds."""
    from roundelay.communicator import Communicator  # noqa: PLC0415 - likewise
    from roundelay.launch import run  # noqa: PLC0415 - likewise

    what = "comm.empty(1 << 50)"

    def ask(comm: Communicator) -> tuple[str, str]:
        try:
            comm.empty(1 << 50)
        except MemoryError as error:
            return str(error), type(error).__name__
        return "was given", ""

    return Shown(what, *run(ask, RANKS)[0])


def main() -> None:
    """Try one after the other; each is told as soon as it is known."""
    for attempt in (full_shm, little_memory, large_array):
        sys.stdout.write(msgspec.json.encode(attempt()).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
