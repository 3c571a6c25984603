"""The directory in which ranks meet: this user's alone, locked by rank 0, gone afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from roundelay.errors import RendezvousError

__all__ = ["RendezvousDirectory"]

PRIVATE = 0o700
LOCK_S = 2.0  # for a rank 0 that is on its way out
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAME = "socket"


class RendezvousDirectory:
    """A directory with a socket in it, reached by descriptor: nobody can put another in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory: int | None = None

    def take(self) -> socket.socket:
        """Make the directory, or clean up a dead job's, and return a socket that listens in it."""
        deadline = time.monotonic() + LOCK_S
        while not self._lock():
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"another rank 0 is waiting for its ranks in {self.path}: two processes have "
                    f"RANK=0, or two jobs have the same MASTER_ADDR and MASTER_PORT. "
                    f"Give this one a MASTER_PORT of its own."
                )
            time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):  # of a job that was killed
            os.unlink(NAME, dir_fd=self._directory)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.bind(self._address())
            listening.listen(128)
        except OSError as error:
            listening.close()
            raise self._unfit(error) from None
        return listening

    def connect(self) -> socket.socket:
        """Return a connection to whoever listens; `OSError` when nobody does yet."""
        self._open()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self._address())
        except OSError:
            connection.close()
            raise
        finally:
            self._close()
        return connection

    def remove(self) -> None:
        """Remove the socket and the directory; no harm when they are gone."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.unlink(NAME, dir_fd=self._directory)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        self._close()

    def sweep(self) -> None:
        """Remove a dead job's; leave one that lives, or is not ours, alone."""
        try:
            self._open()
            locked = self._try_lock()
        except (OSError, RendezvousError):
            locked = False
        if locked:
            self.remove()
        self._close()

    def _lock(self) -> bool:
        """Make and lock the directory; False if another rank 0 holds it, or has just removed it."""
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=PRIVATE)
        except OSError as error:  # not there, not writable, full, or no place for files at all
            raise self._unfit(error) from None
        try:
            self._open()
        except FileNotFoundError:
            return False
        except PermissionError as error:
            raise self._unfit(error) from None
        if self._try_lock():
            return True
        self._close()
        return False

    def _try_lock(self) -> bool:
        """Lock what was opened, and make sure that it still is what the path names."""
        directory = self._directory
        if directory is None:
            return False
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = self.path.stat(follow_symlinks=False)
        except (BlockingIOError, FileNotFoundError):
            return False
        return os.path.samestat(named, os.fstat(directory))

    def _open(self) -> None:
        self._close()
        try:
            self._directory = os.open(self.path, OPEN)
        except NotADirectoryError:
            raise RendezvousError(self._foreign("it is a link or a file")) from None
        status = os.fstat(self._directory)
        if status.st_uid != os.geteuid():
            self._close()
            raise RendezvousError(self._foreign(f"it belongs to user {status.st_uid}"))
        if stat.S_IMODE(status.st_mode) & 0o077:
            self._close()
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            raise RendezvousError(self._foreign(f"others may enter it (mode {mode})"))

    def _unfit(self, error: OSError) -> RendezvousError:
        return RendezvousError(
            f"there can be no rendezvous in {self.path.parent}: {error.strerror}. Set "
            f"XDG_RUNTIME_DIR or TMPDIR to a directory that is there and that you can write."
        )

    def _foreign(self, problem: str) -> str:
        return (
            f"there is no rendezvous in {self.path}: {problem}, so somebody else put it there. "
            f"Remove it, or set XDG_RUNTIME_DIR to a directory of your own."
        )

    def _address(self) -> str:
        # By way of the descriptor: no limit on the length of the path, and no change under it.
        return f"/proc/self/fd/{self._directory}/{NAME}"

    def _close(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None
