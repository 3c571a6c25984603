"""Start the measuring ranks and hand on what they find as it comes."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec

from roundelay.bench.messages import Message, Spec, read_message
from roundelay.bench.peer_deepspeed import check_deepspeed
from roundelay.bench.peer_gloo import check_gloo
from roundelay.bench.peer_mpi import MPIS, find_launcher, launcher
from roundelay.engines import engines
from roundelay.errors import InvalidArgumentError, RoundelayError

__all__ = ["installed_peers", "measure"]

CHECKS: Mapping[str, Callable[[], object]] = {
    "gloo": check_gloo,
    "mpi": partial(find_launcher, "mpi"),
    "mpich": partial(find_launcher, "mpich"),
    "intel": partial(find_launcher, "intel"),
    "deepspeed": check_deepspeed,
}


def measure(spec: Spec) -> Iterator[Message]:
    """Yield a head and then a row for every case; raises when the ranks fail."""
    _check(spec)
    spec = msgspec.structs.replace(spec, job=secrets.token_hex(8))
    command = [sys.executable, "-m", "roundelay.bench", msgspec.json.encode(spec).decode()]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for peer in MPIS:
        if peer in spec.contenders:
            start, around = launcher(peer, spec.size)
            command, environment = [*start, *command], {**environment, **around}
    with subprocess.Popen(  # noqa: S603 - ourselves, maybe by the user's own launcher
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            yield from _messages(process)
        finally:
            if process.poll() is None:
                process.terminate()
    if process.returncode != 0:
        raise RoundelayError(
            f"The measuring ranks ended with exit code {process.returncode}; what they said stands "
            f"above. `roundelay doctor` checks this host."
        )


def _messages(process: subprocess.Popen[bytes]) -> Iterator[Message]:
    if process.stdout is None:
        return
    for line in process.stdout:
        try:
            yield read_message(line)
        except msgspec.DecodeError:
            # Launchers and libraries talk on standard output too; their words are for the user.
            sys.stderr.buffer.write(line)
    process.wait()


def _check(spec: Spec) -> None:
    peers = [name for name in CHECKS if name in spec.contenders]
    engine = engines.load(spec.engine)
    joined = engine.in_processes and (engine.can("join") or not set(MPIS) & set(peers))
    if peers and not joined:
        raise InvalidArgumentError(
            f"{' and '.join(peers)} run in processes: measure against them with "
            f"--engine shared_memory."
        )
    several = [name for name in MPIS if name in peers]
    if len(several) > 1:
        raise InvalidArgumentError(
            f"{' and '.join(several)}: a process can hold one MPI only. Measure against one after "
            f"the other."
        )
    for name in peers:
        CHECKS[name]()


def installed_peers() -> list[str]:
    """Return the peers that can be measured against here."""
    peers = []
    for name, check in CHECKS.items():
        with contextlib.suppress(InvalidArgumentError):
            check()
            peers.append(name)
    return peers
