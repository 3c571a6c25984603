"""Worlds of ranks with torch and the backend in them, used again by many tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed")
_core = pytest.importorskip("roundelay._core")
if not hasattr(_core, "World"):
    pytest.skip("ranks of one host need Linux", allow_module_level=True)

KEY = b"roundelay-tests"
GIVE_UP = 120.0  # seconds after which a rank counts as hanging


class Failed(AssertionError):  # noqa: N818 - says what happened
    """A rank raised: `kind` and `text` say what."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        self.rank, self.kind, self.text = rank, kind, text
        super().__init__(f"rank {rank}: {trace}")


class World:
    """Ranks that wait for functions to run."""

    def __init__(self, lines: list[Connection], pids: list[int]) -> None:
        self.lines, self.pids = lines, pids

    def outcomes(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's value, or a `Failed`; None for a rank that is gone."""
        task = (fn.__code__.co_filename, fn.__name__, arguments)
        for line in self.lines:
            line.send(task)
        found: list[Any] = [None] * len(self.lines)
        waiting = dict(enumerate(self.lines))
        while waiting:
            ready = wait(list(waiting.values()), GIVE_UP)
            assert ready, f"ranks {list(waiting)} hang in {fn.__name__}"
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                try:
                    kind, value = waiting.pop(rank).recv()
                except (EOFError, ConnectionError):
                    continue
                found[rank] = value if kind == "value" else Failed(rank, *value)
        return found

    def __call__(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's value; fail if any rank did."""
        found = self.outcomes(fn, *arguments)
        # A rank that only heard of another's trouble says less than that one.
        for one in sorted(
            (f for f in found if isinstance(f, Failed)), key=lambda f: f.kind == "PeerLost"
        ):
            raise one
        return found

    def close(self) -> None:
        for line in self.lines:
            line.close()


class Worlds:
    """Makes worlds; those of a size are shared, unless a test will break its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(str(Path(self._folder.name) / "tests"), "AF_UNIX", 16, KEY)
        server = Path(__file__).parent / "rank_server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(server), str(self._listener.address)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._made = 0
        self._shared: dict[int, World] = {}

    def fresh(self, size: int, timeout: float = 60.0) -> World:
        """Return a world of a test's own."""
        self._made += 1
        assert self._server.stdin is not None
        self._server.stdin.write(f"{self._made} {size} {timeout}\n")
        self._server.stdin.flush()
        lines: dict[int, tuple[Connection, int]] = {}
        while len(lines) < size:
            line = self._listener.accept()
            number, rank, pid = line.recv()
            if number == self._made:
                lines[rank] = line, pid
        return World([lines[r][0] for r in range(size)], [lines[r][1] for r in range(size)])

    def of(self, size: int) -> World:
        """Return the world that tests share."""
        if size not in self._shared:
            self._shared[size] = self.fresh(size)
        return self._shared[size]

    def close(self) -> None:
        for world in self._shared.values():
            world.close()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._listener.close()
        self._folder.cleanup()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()
