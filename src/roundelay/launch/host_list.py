"""Hosts by name, with how many ranks each takes: `-H node0:4,node1:4`, as mpirun and horovodrun."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.errors import InvalidArgumentError
from roundelay.launch.environment import LOOPBACK

__all__ = ["HostSlots", "all_here", "read_hostfile", "read_hosts", "slots"]

FORM = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:,\[\]]+)(?::([1-9][0-9]{0,5}))?")


#: Behind a host in a file, as Open MPI reads it; MPICH's files have `node0:4`.
SLOTS = re.compile(r"(?<![\w-])slots\s*=\s*([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host, and how many ranks it takes; None where that was not said."""

    name: str
    slots: int | None


def read_hosts(text: str) -> list[HostSlots]:
    """Read a list of hosts.

    >>> read_hosts("node0:4,node1")
    [HostSlots(name='node0', slots=4), HostSlots(name='node1', slots=None)]
    """
    hosts = []
    for word in text.split(","):
        found = FORM.fullmatch(word.strip())
        if found is None:
            raise InvalidArgumentError(
                f"-H {text[:60]!r}: {word[:60]!r} is no host with its number of ranks. Write "
                f"node0:4,node1:4."
            )
        hosts.append(HostSlots(found[1], int(found[2]) if found[2] else None))
    return hosts


def read_hostfile(path: str) -> list[HostSlots]:
    """Read the hosts of a file for mpirun, one on each line; what else it says is mpirun's."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InvalidArgumentError(
            f"--hostfile {path}: can't read it, {why}. Name a file with a line for each host: "
            f"node0 slots=4."
        ) from None
    hosts = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            named, said = FORM.fullmatch(words[0]), SLOTS.search(" ".join(words))
            count = said[1] if said else named[2] if named else None
            hosts.append(HostSlots(named[1] if named else words[0], int(count) if count else None))
    if not hosts:
        raise InvalidArgumentError(
            f"--hostfile {path}: no host is in it. Write a line for each: node0 slots=4."
        )
    return hosts


def slots(hosts: Sequence[HostSlots]) -> int:
    """Return how many ranks all take together; one for each that does not say."""
    return sum(host.slots or 1 for host in hosts)


def all_here(hosts: Sequence[HostSlots]) -> bool:
    """Tell whether all of them are this host, by its own name or as a loopback."""
    own = socket.gethostname()
    names = {own, own.partition(".")[0]}
    return all(host.name in names or LOOPBACK.fullmatch(host.name) for host in hosts)
