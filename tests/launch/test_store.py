"""The store of a job: it answers in time or is lost, trusts what is signed, and listens once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import InvalidArgumentError, RendezvousError
from roundelay.launch.environment import StoreAt
from roundelay.launch.store import store_at
from roundelay.rendezvous.by_store import await_all
from roundelay.rendezvous.secret import found_secret
from roundelay.rendezvous.store import Store, StoreLost, open_store

distributed = pytest.importorskip("torch.distributed")
SECRET = b"known to all ranks"


def opened(raw: Any, secret: bytes = SECRET) -> Store:
    return open_store(lambda: raw, "the store", secret, 5)


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def at(port: int, host: str = "127.0.0.1", *, serves: bool = False) -> StoreAt:
    return StoreAt(host, port, serves, "corner")


@pytest.fixture
def served() -> Iterator[tuple[Store, int]]:
    port = free_port()
    yield store_at(distributed, at(port, serves=True), "rank 0", 2, SECRET, 10), port


def in_python() -> Any:
    """Return a store as those in Python are, which need not compare and set."""

    class Plain(distributed.Store):  # type: ignore[misc,name-defined] # optional, so without types
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.kept[key] = bytes(value)

        def get(self, key: str) -> bytes:
            return self.kept[key]

        def check(self, keys: list[str]) -> bool:
            return all(key in self.kept for key in keys)

    return Plain()


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("kind", ["hash", "file", "python"])
def test_the_first_to_claim_has_it(kind: str, prefixed: bool, tmp_path: Path) -> None:  # noqa: FBT001
    raw: Any = {
        "hash": distributed.HashStore,
        "file": lambda: distributed.FileStore(str(tmp_path / "store"), 2),
        "python": in_python,
    }[kind]()
    shown = distributed.PrefixStore("a/", raw) if prefixed else raw
    mine, theirs = opened(shown), opened(shown)
    assert (mine.claim("first", b"me"), theirs.claim("first", b"you")) == (True, False)
    assert theirs.look("first") == b"me"
    theirs.set("first", b"you")
    assert mine.get("first", 1) == b"you"


def test_others_are_looked_after_while_one_is_waited_for() -> None:
    store = opened(distributed.HashStore())

    def gives_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        await_all(store, ["nobody"], 0, 1, 60, meanwhile=gives_up)
    store.set("here", b"me")
    assert await_all(store, ["here"], 0, 1, 60, meanwhile=gives_up) == [b"me"]


def test_what_one_rank_writes_another_reads() -> None:
    raw = distributed.HashStore()
    mine, theirs = opened(raw).within("a"), opened(raw).within("a")
    mine.set("key", b"\x00\xff value")
    assert theirs.get("key", 1) == b"\x00\xff value"
    assert theirs.look("none") is None
    assert (mine.claim("first", b"me"), theirs.claim("first", b"you")) == (True, False)
    assert theirs.look("first") == b"me"
    mine.forget("key")
    assert not theirs.has("key")
    with pytest.raises(TimeoutError):
        theirs.get("key", 0.05)


@pytest.mark.parametrize("forged", [b"", b"\xff\xfe", b"x" * 100, b"{}", "signed by another"])
def test_what_is_not_signed_by_this_job_is_refused_by_name(forged: Any) -> None:
    raw = distributed.HashStore()
    if isinstance(forged, str):
        opened(raw, b"another secret").set("told/1", forged.encode())
    else:
        raw.set("told/1", forged)
    store = opened(raw)
    assert store.look("told/1") is None
    with pytest.raises(
        RendezvousError, match=r"told/1 does not carry the signature.*ROUNDELAY_SECR"
    ):
        await_all(store, ["told/0", "told/1"][1:], 0, 2, 5)


def test_a_record_under_another_name_is_not_the_same_record() -> None:
    raw = distributed.HashStore()
    store = opened(raw)
    store.set("told/1", b"rank 1")
    raw.set("told/2", raw.get("told/1"))
    assert store.look("told/2") is None


def test_a_rank_may_still_write_over_what_a_stranger_has_put_there() -> None:
    raw = distributed.HashStore()
    raw.set("told/1", b"from a stranger")
    late = threading.Timer(0.3, lambda: opened(raw).set("told/1", b"rank 1"))
    late.start()
    assert opened(raw).get("told/1", 20) == b"rank 1"
    late.join()


class Frozen:
    """A store whose host has stopped, until it goes on."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def check(self, _: Any) -> bool:
        return self.thawed.wait(60)


def test_one_that_does_not_answer_is_lost_at_once_until_it_does() -> None:
    raw = Frozen()
    store = replace(opened(raw), patience=60.0)
    with pytest.raises(StoreLost, match=r"the store has not answered for 0\.\d s"):
        store.connection.ask(lambda: raw.check(["x"]), 0.2)
    start = time.monotonic()
    for call in (lambda: store.has("x"), lambda: store.set("x", b""), lambda: store.get("x", 60)):
        with pytest.raises(StoreLost):
            call()
    assert time.monotonic() - start < 30
    with pytest.raises(
        RendezvousError, match="rank 1 of 2 waited for the others, but the store has"
    ):
        await_all(store, ["told/0"], 1, 2, 60)
    raw.thawed.set()
    while store.connection.silent_for:
        time.sleep(0.001)
    assert store.has("x")


def test_the_time_that_another_has_waited_for_an_answer_counts() -> None:
    raw = Frozen()
    store = opened(raw)
    asked = threading.Thread(target=lambda: store.connection.ask(lambda: raw.check(["x"]), 60))
    asked.start()
    while store.connection.silent_for < 0.2:
        time.sleep(0.01)
    start = time.monotonic()
    with pytest.raises(StoreLost, match="has not answered for"):
        replace(store, patience=0.2).has("x")
    with pytest.raises(StoreLost, match="has not answered for"):
        replace(store, patience=60.0).has("x")
    assert time.monotonic() - start < 30
    raw.thawed.set()
    asked.join()


def test_a_fork_has_no_say() -> None:
    store = opened(distributed.HashStore())
    pid = os.fork()
    if pid == 0:
        try:
            store.set("key", b"")
        except StoreLost:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_signs_of_life_tell_who_is_gone() -> None:
    raw = distributed.HashStore()
    living, dead = opened(raw).live(0, "10.0.0.1"), opened(raw).live(1, "10.0.0.2")
    dead.connection.beat(None)
    assert living.within("group").silent([0, 1], 3) == {1: "10.0.0.2"}


def test_who_waits_watches_and_knows_the_silent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = distributed.HashStore()
    living, dead = opened(raw).live(0, "10.0.0.1"), opened(raw).live(1, "10.0.0.2")
    with living.connection.waiting_for([1]):
        dead.connection.beat(None)
        seen = living.connection._asking.seen
        while 1 not in seen or seen[1].looked - seen[1].since < 1:  # which the beats do
            time.sleep(0.05)
        monkeypatch.setattr(time, "sleep", None)  # nobody waits any more
        assert living.silent([1], 1.0) == {1: "10.0.0.2"}


def test_it_listens_at_one_address_and_strange_bytes_do_no_harm(served: tuple[Store, int]) -> None:
    store, port = served
    for host in ("127.0.0.2", "127.1.2.3"):  # all of them are this host's
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), 5).close()
    store.set("key", b"value")
    for noise in (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 70_000):
        with socket.create_connection(("127.0.0.1", port), 5) as line:
            line.settimeout(5)
            try:
                line.sendall(noise)
                line.shutdown(socket.SHUT_WR)
                line.recv(100)
            except OSError:
                pass  # it hung up, as it may
    assert store.get("key", 5) == b"value"
    other = store_at(distributed, at(port), "rank 1", 2, SECRET, 10)
    assert other.get("key", 5) == b"value"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", r"nothing listens at MASTER_PORT=\d+ of 127.0.0.1"),
        ("no-such-host.invalid", r"MASTER_ADDR=no-such-host.invalid is no name or address"),
    ],
)
def test_who_finds_nobody_says_why_in_one_line(host: str, why: str) -> None:
    with pytest.raises(RendezvousError, match=f"rank 1 of 2 tried for 0.5 s.*: {why}") as caught:
        store_at(distributed, at(free_port(), host), "rank 1 of 2", 2, SECRET, 0.5)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_port_of_somebody_else_is_no_store_and_is_not_free() -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(
            RendezvousError, match="what listens there is no store of this job"
        ) as one:
            store_at(distributed, at(port), "rank 1 of 2", 2, SECRET, 1)
        with pytest.raises(RendezvousError, match="another process has this port") as two:
            store_at(distributed, at(port, serves=True), "rank 0 of 2", 2, SECRET, 5)
    assert "\n" not in str(one.value) + str(two.value)


def test_a_secret_comes_by_a_variable_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("correct horse battery\n")
    path.chmod(0o600)
    assert found_secret({"ROUNDELAY_SECRET_FILE": str(path)}) == b"correct horse battery"
    path.chmod(0o640)
    for environ, why in (
        ({"ROUNDELAY_SECRET_FILE": str(path)}, "can be read by others"),
        ({"ROUNDELAY_SECRET_FILE": str(tmp_path / "none")}, "can't be read: No such file"),
        ({"ROUNDELAY_SECRET": "short"}, "has 5 characters; a secret has 16 to 4096"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            found_secret(environ)
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(InvalidArgumentError, match="it is no text"):
        found_secret({"ROUNDELAY_SECRET_FILE": str(path)})
