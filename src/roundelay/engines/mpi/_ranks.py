"""Ranks under mpirun that serve this process: started together, asked together, ended together."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from roundelay.engines.mpi._rank import DONE, FOLD, read_failure
from roundelay.engines.mpi.mpirun import clean_environment, mpirun
from roundelay.errors import RankFailed, RendezvousError
from roundelay.processes.channel import Channel

__all__ = ["MpiRanks"]

START_S = 60.0
END_S = 5.0
LOOK_S = 0.1
SHOWN = 2000  # characters of what mpirun said

#: What ranks ask this process for while they work.
Serve = Callable[[bytes], bytes]


class MpiRanks:
    """`size` processes that mpirun started on this host; `channels` lead to them, by rank."""

    def __init__(self, size: int) -> None:
        self.channels: list[Channel] = []
        self._owner = os.getpid()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        with (
            tempfile.TemporaryDirectory(prefix="roundelay-") as folder,  # of mode 0700
            socket.socket(socket.AF_UNIX) as door,
        ):
            address = str(Path(folder) / "ranks")
            door.bind(address)
            door.listen(size)
            door.settimeout(LOOK_S)
            words = [*mpirun(size), sys.executable, "-m", "roundelay.engines.mpi._rank", address]
            self._process = subprocess.Popen(  # noqa: S603 - ourselves, by the user's launcher
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=clean_environment(os.environ),
                process_group=0,  # Ctrl-C is for this process to decide on
            )
            try:
                self.channels = self._meet(door, size)
            except BaseException:
                self.end(at_once=True)
                raise

    def _meet(self, door: socket.socket, size: int) -> list[Channel]:
        """Wait until every rank has come; from then on the place of meeting has no name."""
        met: dict[int, Channel] = {}
        limit = time.monotonic() + START_S
        while len(met) < size:
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RendezvousError(
                    f"mpirun did not bring all {size} ranks: {size - len(met)} are missing. "
                    f"{self._last_words()}"
                )
            with contextlib.suppress(TimeoutError):
                line, _ = door.accept()
                line.settimeout(None)
                channel = Channel(line.detach())
                met[int(channel.receive() or b"-1")] = channel
        return [met[rank] for rank in range(size)]

    def answers(self, serve: Serve) -> list[bytes]:
        """Return one answer of every rank; what they ask for meanwhile is served."""
        found: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self.channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(found) < len(self.channels):
                for key, _ in selector.select():
                    rank, channel = key.data, self.channels[key.data]
                    message = channel.receive()
                    if message is None:
                        raise RankFailed(
                            rank, ended=f"ended with no Python error. {self._last_words()}"
                        )
                    if message[:1] == FOLD:
                        channel.send(serve(message[1:]))
                    elif message[:1] == DONE:
                        found[rank] = message[1:]
                        selector.unregister(channel)
                    else:
                        told = read_failure(message[1:])
                        raise RankFailed(rank, told.kind, told.message, traceback=told.traceback)
        return [found[rank] for rank in range(len(self.channels))]

    def end(self, *, at_once: bool = False) -> None:
        """End the ranks; they leave by themselves when nobody asks any more, unless at once."""
        if os.getpid() != self._owner:
            return
        for channel in self.channels:
            if not at_once:
                channel.send(b"")  # a fork of this process may hold the other end open
            channel.close()
        for seconds, finish in (
            (0.0 if at_once else END_S, self._process.terminate),
            (END_S, self._process.kill),
        ):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                finish()
        self._process.wait()
        self._said.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-SHOWN:]
        return f"mpirun said:\n{said}" if said else "mpirun said nothing."
