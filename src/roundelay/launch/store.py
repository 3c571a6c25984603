"""The store of a job: rank 0 or torchrun serves it, and the others find it or say why not."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from roundelay.engines.gloo.groups import load_torch
from roundelay.errors import RendezvousError
from roundelay.launch.environment import LOOPBACK, StoreAt, found_store
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.secret import found_secret
from roundelay.rendezvous.store import Store, StoreLost, open_store

__all__ = ["job_store", "store_at"]

LINGER_S = 5.0  # for ranks that end a little later than the one that serves the store
GIVEN_UP_S = 1.5  # without a sign of life, until nobody waits for a rank that has not ended
TRY_S = 5.0  # for one attempt to reach the store
LOOK_S = 0.02
FIRST_RETRY_S, MOST_RETRY_S = 0.02, 0.5


def job_store(place: JobPlace, environ: Mapping[str, str], timeout: float) -> Store:
    """Return the store of this job, once it can be reached."""
    distributed = load_torch("gloo").distributed
    secret = found_secret(environ)
    if place.job.size == 1:
        return open_store(distributed.HashStore, "this rank's own store", secret, timeout)
    at = found_store(environ, place)
    who = f"rank {place.rank} of {place.job.size}"
    store = store_at(distributed, at, who, place.job.size, secret, timeout).within(at.corner)
    atexit.register(_say_done, store, place, os.getpid(), serves=at.serves)
    return store


def store_at(
    distributed: Any, at: StoreAt, who: str, size: int, secret: bytes, timeout: float
) -> Store:
    """Serve a store, or find the one that is served; raises why not. `who` asks, in words."""
    deadline = time.monotonic() + timeout
    listening = _listening(at, who) if at.serves else None
    if not at.serves:
        _reach(at, who, deadline, timeout)
    left = max(1.0, deadline - time.monotonic())

    def make() -> Any:
        # Several tenants: the script may call init_process_group with the same address.
        return distributed.TCPStore(
            at.host, at.port, size, at.serves, timedelta(seconds=left),
            wait_for_workers=False, multi_tenant=True, master_listen_fd=listening,
        )  # fmt: skip

    where = f"the store at {at.host}:{at.port}, which {at.server} serves,"
    try:
        return open_store(make, where, secret, left)
    except StoreLost as lost:
        if at.serves:
            raise RendezvousError(
                f"{who} can't listen at {at.host}:{at.port} for the others: {_why(str(lost))} Set "
                f"MASTER_ADDR to this host, and MASTER_PORT to a port that is free here."
            ) from None
        raise RendezvousError(
            f"{who} reached {at.host}:{at.port}, but what listens there is no store of this job, "
            f"or its host is frozen: {lost}. See whether MASTER_ADDR and MASTER_PORT are the same "
            f"on all hosts."
        ) from None


def _why(text: str) -> str:
    return "another process has this port." if "EADDRINUSE" in text else f"{text}."


def _listening(at: StoreAt, who: str) -> int | None:
    """Return a socket at the one address that others were told; None lets torch take all.

    Torch's choice is for names that stand for another address here than elsewhere, and for a port
    at which this process serves the script's own store already.
    """
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            at.host, at.port, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        raise RendezvousError(f"{who} can't serve the others: {_unresolved(at)}") from None
    if ip_address(str(where[0]).partition("%")[0]).is_loopback and not LOOPBACK.fullmatch(at.host):
        return None
    listening = socket.socket(family, kind, number)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise RendezvousError(
            f"{who} can't listen at {at.host}:{at.port}: {error.strerror}. Choose "
            f"another MASTER_PORT."
        ) from None
    return listening.detach()


def _reach(at: StoreAt, who: str, deadline: float, timeout: float) -> None:
    """Wait until something listens where the store should be."""
    pause = FIRST_RETRY_S
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((at.host, at.port), max(0.1, min(TRY_S, left))).close()
        except socket.gaierror:
            why = _unresolved(at)
        except ConnectionRefusedError:
            why = (
                f"nothing listens at MASTER_PORT={at.port} of {at.host}. See whether {at.server} "
                f"started there, and whether the port is the same on all hosts."
            )
        except OSError as error:
            why = (
                f"MASTER_ADDR={at.host} can't be reached ({error.strerror or error}). See whether "
                f"it is the address of rank 0's host, and whether a firewall lets port {at.port} "
                f"through."
            )
        else:
            return
        if time.monotonic() + pause > deadline:
            raise RendezvousError(
                f"{who} tried for {timeout:g} s to find the others: {why}"
            ) from None
        time.sleep(pause)
        pause = min(2 * pause, MOST_RETRY_S)


def _unresolved(at: StoreAt) -> str:
    return (
        f"MASTER_ADDR={at.host} is no name or address that this host knows. Set it to the host of "
        f"rank 0."
    )


def _say_done(store: Store, place: JobPlace, pid: int, *, serves: bool) -> None:
    """Leave the store last if this process serves it: the others still say goodbye there."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(StoreLost):  # whoever served it is gone
        store.rest(place.rank)
        end = time.monotonic() + LINGER_S
        missing = list(range(place.job.size)) if serves else []
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not store.rested(rank)]
            # Who is gone for good says nothing more.
            gone = store.silent(missing, GIVEN_UP_S)
            missing = [rank for rank in missing if rank not in gone]
            time.sleep(LOOK_S if missing else 0.0)
