"""Network namespaces of this machine as two or more hosts, with a switch between them.

To everything that talks by sockets they are hosts: each has its own loopback, its own address, and
nothing else in common but the switch, from which a host can be cut off. They are held by sleeping
processes and vanish with them; nothing has a name that could stay behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roundelay.processes.wire import decode, encode

SPACES = ("net", "uts", "ipc", "mnt")
OPTIONS = ("--net", "--uts", "--ipc", "--mount")
NETWORK = "10.213.77"


class Hosts:
    """Some hosts; use as a context manager. `why_not` says why there are none, where that is so."""

    def __init__(self, count: int = 2) -> None:
        self.addresses = [f"{NETWORK}.{host + 1}" for host in range(count)]
        self._holders: list[subprocess.Popen[bytes]] = []  # of every host, and last of the switch
        self.why_not = ""

    def __enter__(self) -> Self:
        missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
        if missing:
            self.why_not = f"needs the command {missing[0]} (of iproute2 or util-linux)"
            return self
        try:
            self._make()
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            self.why_not = f"namespaces are not allowed here: {error} {said.decode().strip()}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _make(self) -> None:
        own = Path("/proc/self/ns/mnt").readlink()
        for _ in (*self.addresses, "the switch"):
            command = ["unshare", *OPTIONS, "sleep", "600"]
            self._holders.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        for holder in self._holders:
            end = time.monotonic() + 5
            while Path(f"/proc/{holder.pid}/ns/mnt").readlink() == own:
                if holder.poll() is not None or time.monotonic() > end:
                    raise OSError("unshare is refused")
                time.sleep(0.005)
        switch = len(self.addresses)
        _do(self.inside(switch, "ip", "link", "add", "switch", "type", "bridge"))
        _do(self.inside(switch, "ip", "link", "set", "switch", "up"))
        for host, address in enumerate(self.addresses):
            peer = f"netns {self._holders[host].pid} name cable"
            cable = f"ip link add port{host} type veth peer {peer}"
            _do(self.inside(switch, *cable.split()))
            _do(self.inside(switch, *f"ip link set port{host} master switch up".split()))
            _do(self.inside(host, *f"ip addr add {address}/24 dev cable".split()))
            for device in ("lo", "cable"):
                _do(self.inside(host, "ip", "link", "set", device, "up"))

    def cut(self, host: int, *, off: bool = True) -> None:
        """Pull a host's cable out of the switch, or put it back."""
        how = "down" if off else "up"
        _do(self.inside(len(self.addresses), "ip", "link", "set", f"port{host}", how))

    def limit(self, gbit: int) -> None:
        """Give the cable of every host so many gigabits per second, each way."""
        for host in range(len(self.addresses)):
            slow = f"tc qdisc add dev cable root tbf rate {gbit}gbit burst 256kb latency 50ms"
            _do(self.inside(host, *slow.split()))

    def inside(self, host: int, *command: str) -> list[str]:
        """Return the command that runs another one on a host."""
        return ["nsenter", "-t", str(self._holders[host].pid), *OPTIONS, *command]

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        for name in SPACES:
            with Path(f"/proc/{self._holders[host].pid}/ns/{name}").open() as space:
                if libc.setns(space.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {name}")

    def fork(self, host: int, fn: Callable[[], Any], variables: Mapping[str, str]) -> ForkedRank:
        """Call a function in a process of its own on a host."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # What breaks off must not hold the test.
                signal.alarm(200)
                self.enter(host)
                os.environ.update(variables)
                said = encode((True, fn()))
            except BaseException as error:  # noqa: BLE001 - told to who forked
                said = encode((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            with os.fdopen(writer, "wb") as line:
                line.write(said)
            os._exit(0)
        os.close(writer)
        return ForkedRank(pid, reader)

    def start(
        self, ranks_per_host: Sequence[int], fn: Callable[[], Any], **variables: str
    ) -> list[ForkedRank]:
        """Call a function on every rank, with the variables that torchrun sets."""
        size, port = sum(ranks_per_host), str(_free_port())
        started: list[ForkedRank] = []
        for host, count in enumerate(ranks_per_host):
            for local in range(count):
                named = {
                    "RANK": str(len(started)), "WORLD_SIZE": str(size),
                    "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": self.addresses[0], "MASTER_PORT": port,
                }  # fmt: skip
                started.append(self.fork(host, fn, {**named, **variables}))
        return started


class ForkedRank:
    """A rank under way; what it returns or raises comes back."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid, self._reader = pid, reader

    def result(self, *, seconds: float = 120) -> tuple[bool, Any]:
        """Return whether it returned, and what; or that it did not, and why not."""
        said, end = b"", time.monotonic() + seconds
        with os.fdopen(self._reader, "rb", buffering=0) as line:
            while select.select([line], [], [], max(0.0, end - time.monotonic()))[0]:
                piece = line.read(1 << 20)
                if not piece:
                    break
                said += piece
            else:
                os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return decode(said) if said and code == 0 else (False, f"ended with {code}")


def _free_port() -> int:
    # Free here, so most likely in the namespaces too, where nobody else is.
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _do(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
