"""Which ranks share a host: told by the kernel, not by names or environment variables.

Two processes are on one host when they can share memory and meet by a path. The boot id is drawn
by the kernel at every start, so it tells machines apart that were cloned, and sees through host
names that were copied. On one machine, containers and namespaces keep processes apart:

- `mnt`: ranks meet at a socket with a path, which another mount namespace need not have;
- `user`: each side asks the kernel for the other's user, who has another number there;
- `ipc`: whoever gave a container one of its own wants no shared memory with the others;
- `net`: it has another loopback, other addresses, and a connection to the rest that may be shaped
  or filtered: to everything that talks by sockets it is another host, so it is to us.

Not `pid` and `uts`: the end of a process is noticed by a pipe, and a name is only a name.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

__all__ = ["address_towards", "host_identity", "ranks_by_host"]

BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = ("ipc", "mnt", "net", "user")
ANYWHERE = "192.0.2.1"  # for documentation only: no such host, but there is a way to it or not


def host_identity() -> str:
    """Return what exactly those processes have in common that can share memory.

    >>> host_identity() == host_identity()
    True
    """
    boot = BOOT.read_text(encoding="ascii").strip()
    return " ".join((boot, *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES)))


def ranks_by_host(identities: Sequence[str]) -> list[list[int]]:
    """Return the ranks of every host; hosts in the order of their lowest rank.

    >>> ranks_by_host(["a", "b", "a", "c", "b"])
    [[0, 2], [1, 4], [3]]
    """
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def address_towards(host: str) -> str | None:
    """Return the address of this host that others beyond it can reach; None if nobody can tell.

    It is the one with which packets to `host`, where all ranks have met, would leave. A host's
    name is no help: it often stands for the loopback.
    """
    for target in (host, ANYWHERE):
        try:
            family, kind, number, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, kind, number) as trial:
                trial.connect(where)  # sends nothing: it only chooses the way
                own = str(trial.getsockname()[0])
        except OSError:
            continue
        if not ip_address(own.partition("%")[0]).is_loopback:
            return own
    return None
