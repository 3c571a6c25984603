"""Ranks under mpirun that serve this process: started together, and ended together."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import IO

from roundelay.engines.mpi.mpirun import clean_environment, mpirun
from roundelay.errors import RankFailed

END_S = 5.0
SHOWN = 2000  # characters of what mpirun said


class MpirunRanks:
    """`size` processes that mpirun started on this host, and that come to `address`."""

    def __init__(self, size: int, address: str) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        self._process = subprocess.Popen(  # noqa: S603 - ourselves, by the user's launcher
            [*mpirun(size), sys.executable, "-m", "roundelay.engines.mpi._rank", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env=clean_environment(os.environ),
            process_group=0,  # Ctrl-C is for this process to decide on
        )

    def runs(self) -> bool:
        """Tell whether mpirun has not ended."""
        return self._process.poll() is None

    def failure(self, rank: int) -> RankFailed:
        """Return an error with the last words of mpirun."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-SHOWN:]
        words = f"mpirun said:\n{said}" if said else "mpirun said nothing."
        return RankFailed(rank, ended=f"ended before it had answered. {words}")

    def end(self, *, at_once: bool) -> None:
        """Wait for the ranks to leave by themselves, unless at once; then make them."""
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
