"""Ray's own key-value store as that of a job: by it ranks meet wherever Ray has started them.

No port is opened for it, and torch is needed only where Gloo joins several hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
from ray.experimental import internal_kv

from roundelay.arguments import FOREVER_S
from roundelay.communicator.selection import Selection
from roundelay.engines import Engine
from roundelay.errors import UnknownNameError
from roundelay.launch.environment import base_directory, found_timeout
from roundelay.launch.local import check_timeout, engine_called
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.store import Store, open_store

__all__ = ["RayStore", "check_engine", "forget", "join", "wait_limit"]

T = TypeVar("T")

NAMESPACE = "roundelay"  # of keys; those of Ray and of others have theirs
ENGINES = ("gloo", "hierarchical", "nccl")
WHERE = "Ray's key-value store, which the head node serves,"


class RayStore:
    """As much of torch's store as ranks ask for; what goes wrong is a RuntimeError, as there."""

    def __init__(self) -> None:
        # Where it is served: the way there is the one by which other nodes reach this one.
        address = ray.get_runtime_context().gcs_address
        self.host = address.rpartition(":")[0].strip("[]")

    def set(self, name: str, value: bytes) -> None:
        """Write a record over what was there."""
        _asked(internal_kv._internal_kv_put, name, value)  # noqa: SLF001 - Ray has no other name

    def get(self, name: str) -> bytes:
        """Return a record that is there."""
        found = self.look(name)
        if found is None:
            raise RuntimeError(f"{name} was removed")
        return found

    def look(self, name: str) -> bytes | None:
        """Return a record, or None."""
        found: bytes | None = _asked(internal_kv._internal_kv_get, name)  # noqa: SLF001
        return found

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin so, without that."""
        found = _asked(internal_kv._internal_kv_list, prefix)  # noqa: SLF001
        return [name.decode().removeprefix(prefix) for name in found]

    def check(self, names: Sequence[str]) -> bool:
        """Tell whether all of these are there."""
        return all(_asked(internal_kv._internal_kv_exists, name) for name in names)  # noqa: SLF001

    def compare_set(self, name: str, expected: str, desired: bytes) -> bytes:
        """Write a record where there is none, and return what is there then."""
        del expected  # nothing, whoever asks
        _asked(internal_kv._internal_kv_put, name, desired, overwrite=False)  # noqa: SLF001
        return self.get(name)

    def delete_key(self, name: str) -> bool:
        """Remove a record."""
        return bool(_asked(internal_kv._internal_kv_del, name))  # noqa: SLF001

    def has_extended_api(self) -> bool:
        """Tell that several records are not read at once."""
        return False


def _asked(ask: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return ask(*args, namespace=NAMESPACE, **options)
    except Exception as error:  # of many kinds; a client that was shut down is None
        raise RuntimeError(str(error) or type(error).__name__) from error


def forget(token: str) -> None:
    """Remove all that the ranks of a job have written."""
    _asked(internal_kv._internal_kv_del, f"{token}/", del_by_prefix=True)  # noqa: SLF001


def check_engine(name: str | None) -> None:
    """Refuse an engine by which ranks of Ray can't be joined."""
    if name is not None and name not in ENGINES:
        raise UnknownNameError("engines for ranks of Ray", str(name), ENGINES)


def wait_limit(timeout: float | None) -> float:
    """Return how long ranks wait for one another: as said, or by ROUNDELAY_TIMEOUT, or 60 s."""
    default = found_timeout(os.environ)
    return check_timeout("timeout", default if timeout is None else timeout)


def join(
    token: str, rank: int, size: int, *, timeout: float | None = None, engine: str | None = None
) -> Engine:
    """Return the engine of this rank, once all of a job are there.

    What the ranks have in common is a token that nobody else has: it names their part of the store
    and signs what they write there.
    """
    check_engine(engine)
    limit = min(wait_limit(timeout), FOREVER_S)
    job = Job(token, size, base_directory(os.environ))
    if size == 1 and engine is None:
        place, engine = JobPlace(rank, job), "shared_memory"
    else:
        place = JobPlace(rank, job, "store")
    kind = engine_called(engine or "hierarchical", "join")
    return kind.join(place, partial(_open, token, limit), select=Selection, timeout=limit)


def _open(token: str, timeout: float) -> Store:
    return open_store(RayStore, WHERE, token.encode(), timeout).within(token)
