"""Where the processes of one job on one host meet: rank 0 makes the memory, the others get it.

Rank 0 serves a Unix socket in a directory that only this user can enter, and removes both as soon
as everybody is in. Messages are fixed structs with descriptors beside them. Each side asks the
kernel who the other one is. Nobody waits longer than the timeout.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from roundelay import _core
from roundelay.errors import RendezvousError
from roundelay.processes.limits import allow_descriptors, no_files_left, telling_limits
from roundelay.processes.world import make_world
from roundelay.rendezvous import _messages as messages
from roundelay.rendezvous._server import RendezvousServer
from roundelay.rendezvous.directory import RendezvousDirectory

__all__ = ["Job", "forget", "rendezvous"]

FIRST_RETRY_S, MOST_RETRY_S = 0.001, 0.05
SPARE = 64  # descriptors, for what the program itself opens
LATER_S = 0.5  # so that all give up for the reason that rank 0 gives


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of a job agree on beforehand: its id, its size, and where to look."""

    id: str
    size: int
    base: Path

    @property
    def path(self) -> Path:
        """The directory to meet in: one for each user and id."""
        digest = hashlib.sha256(self.id.encode()).hexdigest()[:24]
        return self.base / f"roundelay-{os.geteuid()}-{digest}"


def rendezvous(job: Job, rank: int, *, timeout: float) -> _core.World:
    """Return the world of the job, entered as `rank` and watched, once all ranks are in it."""
    with telling_limits(f"rank {rank} of a job of {job.size}"):
        return _rendezvous(job, rank, timeout)


def _rendezvous(job: Job, rank: int, timeout: float) -> _core.World:
    deadline = time.monotonic() + timeout
    allow_descriptors(3 * job.size + SPARE)
    reader, writer = os.pipe()
    kept = [reader, writer]
    try:
        if rank == 0:
            world = make_world(job.size)
            with RendezvousServer(
                RendezvousDirectory(job.path), job.size, deadline, timeout
            ) as server:
                others = server.gather(world, reader)
        else:
            world, others = _join(job, rank, reader, deadline, timeout)
        kept = [reader]  # the world closes the other ones when it ends
        world.watch([*others[:rank], -1, *others[rank:]], writer)
    finally:
        for descriptor in kept:
            os.close(descriptor)
    return world


def forget(job: Job) -> None:
    """Remove what a job left behind whose rank 0 was killed while the ranks were meeting."""
    RendezvousDirectory(job.path).sweep()


def _join(
    job: Job, rank: int, reader: int, deadline: float, timeout: float
) -> tuple[_core.World, list[int]]:
    """Bring the own pipe to rank 0; return the world and the other ranks' pipes, by rank."""
    taken: list[int] = []
    with _connect(job, rank, deadline, timeout) as connection:
        try:
            hello = messages.Hello(rank, job.size, _core.version)
            messages.send(connection, messages.HELLO, hello.pack(), [reader])
            world = _enter(connection, rank, job.size, deadline, taken)
        except BaseException as error:
            for descriptor in taken:
                os.close(descriptor)
            if isinstance(error, TimeoutError):
                missing = error.args[0] if error.args else "the others"
                raise RendezvousError(
                    f"rank {rank} waited {timeout:g} s, but {missing} of {job.size} did not come. "
                    f"See whether they started, or allow more time with timeout."
                ) from None
            if isinstance(error, OSError) and no_files_left(error):
                raise
            if isinstance(error, (EOFError, OSError)):
                raise RendezvousError(
                    f"rank 0 went away during the rendezvous with rank {rank} and the others."
                ) from None
            raise
    os.close(taken.pop(0))  # the world has its own
    return world, taken


def _enter(
    connection: socket.socket, rank: int, size: int, deadline: float, taken: list[int]
) -> _core.World:
    """Follow rank 0 until all are in; raises `TimeoutError` with the ranks that are missing."""
    missing, world = "the others", None
    while True:
        try:
            kind, body = messages.receive(connection, deadline + LATER_S, taken)
        except TimeoutError:
            raise TimeoutError(missing) from None
        if kind == messages.WAITING:
            missing = body.decode(errors="replace")
        elif kind == messages.WORLD and world is None and len(taken) == size:
            world = _core.World.attach(taken[0], body)
            world.enter(rank)
            messages.send(connection, messages.ENTERED)
        elif kind == messages.GO and world is not None:
            return world
        elif kind == messages.REFUSED:
            raise RendezvousError(f"rank {rank} can't take part: {body.decode(errors='replace')}")
        elif kind != messages.PART or len(taken) > size:
            raise RendezvousError("rank 0 does not keep to the protocol")


def _connect(job: Job, rank: int, deadline: float, timeout: float) -> socket.socket:
    """Return a connection to rank 0, as soon as it listens and if it is this user's."""
    place, pause = RendezvousDirectory(job.path), FIRST_RETRY_S
    while True:
        try:
            connection = place.connect()
        except OSError as error:  # not there yet
            if no_files_left(error):
                raise
            if time.monotonic() + pause > deadline:
                raise RendezvousError(
                    f"rank {rank} of {job.size} waited {timeout:g} s for rank 0 at {job.path}. "
                    f"See whether rank 0 started, on this host, with the same MASTER_ADDR, "
                    f"MASTER_PORT and XDG_RUNTIME_DIR, or allow more time with timeout."
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, MOST_RETRY_S)
            continue
        pid, uid = messages.peer(connection)
        if uid != os.geteuid():
            connection.close()
            raise RendezvousError(
                f"user {uid} (process {pid}) listens at {job.path}, where only this user should."
            )
        return connection
