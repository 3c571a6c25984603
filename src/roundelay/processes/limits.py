"""Limits of a process or a user on files, processes and threads, in our words when they are hit."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from roundelay.errors import LimitError

__all__ = ["allow_descriptors", "limit_hit", "no_files_left", "telling_limits"]

NO_FILES = (errno.EMFILE, errno.ENFILE)
STACK = 8 << 20  # bytes that a thread's stack takes where nothing else is said
NO_THREAD = "can't start new thread"  # as Python says it


def allow_descriptors(count: int) -> None:
    """Let this process open so many more, as far as it may allow that to itself.

    Every rank holds a pipe of every other, which is more than a process usually may.
    """
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if usual == resource.RLIM_INFINITY:
        return
    wanted = len(list(Path("/proc/self/fd").iterdir())) + count
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if usual < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def no_files_left(error: OSError) -> bool:
    """Tell whether no file, pipe or socket can be opened any more."""
    return error.errno in NO_FILES


def limit_hit(what: str, error: OSError | RuntimeError) -> LimitError | None:
    """Return in our words the limit that an error comes from; None if it comes from none."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and no_files_left(error):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = "" if hard == resource.RLIM_INFINITY else f" (only root goes beyond {hard})"
        whose = f"this process may have {soft} files open" if number == errno.EMFILE else (
            "this machine can have no more files open"
        )  # fmt: skip
        return LimitError(
            f"{what}: {whose}, pipes and sockets among them, and that is not enough. Raise the "
            f"limit: `ulimit -n {max(1024, 4 * soft)}`{most}; or start fewer ranks.", number
        )  # fmt: skip
    if NO_THREAD in str(error) and (full := _address_space()):
        return LimitError(
            f"{what}: a thread finds no room in the address space of this process: {full}. Raise "
            f"the limit: `ulimit -v unlimited`; or start fewer ranks.", errno.ENOMEM
        )  # fmt: skip
    if number in (errno.EAGAIN, errno.ENOMEM) or NO_THREAD in str(error):
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        said = "unlimited" if soft == resource.RLIM_INFINITY else soft
        return LimitError(
            f"{what}: the kernel starts no more processes or threads for this user (`ulimit -u` is "
            f"{said}; a container may have a limit of its own). End some, start fewer ranks, or "
            f"raise the limit.", number or errno.EAGAIN
        )  # fmt: skip
    return None


def _address_space() -> str:
    """Say how much of it there may be and is, if too little is left for a thread."""
    most, stack = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_STACK)
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if most == resource.RLIM_INFINITY or used + max(stack, STACK) <= most:
        return ""
    return f"`ulimit -v` is {most >> 10}, and {used >> 10} KiB are in use"


@contextlib.contextmanager
def telling_limits(what: str) -> Iterator[None]:
    """Raise `LimitError` for what is caused by a limit; all else as it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        limit = None if isinstance(error, LimitError) else limit_hit(what, error)
        if limit is None:
            raise
        raise limit from None
