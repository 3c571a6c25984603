"""Ranks of one host find one another, or say who is missing; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundelay import _core
from roundelay.errors import RendezvousError
from roundelay.rendezvous import _messages as messages
from roundelay.rendezvous._server import RendezvousServer
from roundelay.rendezvous.directory import RendezvousDirectory
from roundelay.rendezvous.one_host import Job, forget, rendezvous

MakeJob = Callable[[int], Job]
Fork = Callable[..., Any]
Wait = Callable[..., None]
ABSENT = 0


def come(job: Job, rank: int, timeout: float = 20) -> str:
    world = rendezvous(job, rank, timeout=timeout)
    entered = all(world.life(other) != ABSENT for other in range(job.size))
    return f"{rank} {world.size} {entered} {world.token.hex()}"


def line_to(job: Job, wait_until: Wait) -> socket.socket:
    lines: list[socket.socket] = []

    def listened() -> bool:  # a moment after there is a name
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            lines.append(RendezvousDirectory(job.path).connect())
        return bool(lines)

    wait_until(listened)
    return lines[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("parts", [2, 250])
def test_all_ranks_get_one_world_and_nothing_is_left(
    make_job: MakeJob, forked: Fork, monkeypatch: pytest.MonkeyPatch, size: int, parts: int
) -> None:
    monkeypatch.setattr(messages, "MOST_DESCRIPTORS", parts)
    job = make_job(size)
    said = [each.result() for each in [forked(come, job, rank) for rank in range(size)]]

    heads, tokens = zip(*(text.rsplit(" ", 1) for text in said), strict=True)
    assert list(heads) == [f"{rank} {size} True" for rank in range(size)]
    assert len(set(tokens)) == 1
    assert list(job.base.iterdir()) == []


def test_ranks_may_come_in_any_order(make_job: MakeJob, forked: Fork) -> None:
    job = make_job(3)
    early = [forked(come, job, rank) for rank in (2, 1)]
    time.sleep(0.1)
    assert not job.path.exists()  # so they really wait
    late = forked(come, job, 0)
    assert [each.result().split()[0] for each in [*early, late]] == ["2", "1", "0"]


def test_meeting_leaks_no_descriptor(make_job: MakeJob, forked: Fork) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(3):
        other = forked(come, make_job(2), 1)
        rendezvous(make_job(2), 0, timeout=20)
        other.result()
        other.close()
    for rank in range(2):
        with pytest.raises(RendezvousError):
            rendezvous(make_job(2), rank, timeout=0.05)
    assert descriptors() == before


@pytest.mark.parametrize(("size", "here"), [(2, [0]), (3, [0, 2]), (4, [0, 1]), (5, [0, 1, 2, 4])])
def test_all_who_came_name_all_who_did_not(
    make_job: MakeJob, forked: Fork, size: int, here: list[int]
) -> None:
    missing = [rank for rank in range(size) if rank not in here]
    named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {size}"
    started = [forked(come, make_job(size), rank, 1.0) for rank in here]
    for each in started:
        said = each.result()
        assert said.startswith("RendezvousError: ")
        assert named in said
    assert list(make_job(size).base.iterdir()) == []


def test_a_rank_that_gives_up_first_names_who_is_missing_too(
    make_job: MakeJob, forked: Fork
) -> None:
    patient = forked(come, make_job(3), 0, 20)
    hasty = forked(come, make_job(3), 1, 1.0)
    assert "rank 2 of 3 did not come" in hasty.result()
    assert "rank 1 (process" in patient.result()  # it went away, and that is said at once


def test_without_rank_0_the_place_is_named(make_job: MakeJob) -> None:
    with pytest.raises(RendezvousError, match=f"for rank 0 at {make_job(2).path}"):
        rendezvous(make_job(2), 1, timeout=0.05)


def test_a_second_process_of_the_same_rank_is_refused_and_the_first_is_not(
    make_job: MakeJob, forked: Fork
) -> None:
    job = make_job(3)
    zero = forked(come, job, 0)
    twins = [forked(come, job, 1)]
    time.sleep(0.3)
    twins.append(forked(come, job, 1))
    assert "two processes have RANK=1" in twins[1].result()
    two = forked(come, job, 2)
    assert [each.result().split()[1] for each in (zero, twins[0], two)] == ["3"] * 3


def test_a_second_rank_0_is_refused(
    make_job: MakeJob, forked: Fork, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.rendezvous.directory.LOCK_S", 0.1)
    job = make_job(2)
    first = forked(come, job, 0)
    wait_until((job.path / "socket").exists)
    assert "another rank 0 is waiting" in forked(come, job, 0).result()
    one = forked(come, job, 1)
    assert first.result().split()[1] == one.result().split()[1] == "2"


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (messages.Hello(1, 3, _core.version), "rank 1 of 3, but rank 0 was told WORLD_SIZE=2"),
        (messages.Hello(2, 2, _core.version), "ranks go from 0 to 1"),
        (messages.Hello(0, 2, _core.version), "ranks go from 0 to 1"),
        (messages.Hello(1, 2, "0.0.7"), "roundelay 0.0.7, but rank 0 has roundelay"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_name_on_both_sides(
    make_job: MakeJob, forked: Fork, wait_until: Wait, hello: messages.Hello, problem: str
) -> None:
    zero = forked(come, make_job(2), 0, 1.0)
    with line_to(make_job(2), wait_until) as line:
        messages.send(line, messages.HELLO, hello.pack(), [line.fileno()])
        kind, body = messages.receive(line, time.monotonic() + 10, [])
    assert kind == messages.REFUSED
    assert problem in body.decode()
    said = zero.result()
    assert "rank 1 of 2 has not come" in said
    assert problem in said


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.lists(st.binary(max_size=4096), min_size=1, max_size=5))
def test_strangers_do_not_disturb(
    make_job: MakeJob, forked: Fork, wait_until: Wait, noise: list[bytes]
) -> None:
    """Noise, silence, half a hello and too many descriptors come before the ranks do."""
    job = make_job(2)
    zero = forked(come, job, 0)
    strangers = [line_to(job, wait_until) for _ in noise]
    for line, data in zip(strangers, noise, strict=True):
        line.sendmsg([data])
    silent = line_to(job, wait_until)
    greedy = line_to(job, wait_until)
    hello = messages.Hello(1, 2, _core.version)
    messages.send(greedy, messages.HELLO, hello.pack(), [greedy.fileno()] * 20)
    short = line_to(job, wait_until)
    messages.send(short, messages.HELLO, hello.pack()[:-1], [short.fileno()])
    one = forked(come, job, 1)
    said = [zero.result(), one.result()]
    for line in (*strangers, silent, greedy, short):
        line.close()
    assert [text.rsplit(" ", 1)[0] for text in said] == ["0 2 True", "1 2 True"], said
    assert list(job.base.iterdir()) == []


def test_callers_that_stay_silent_are_dropped(
    make_job: MakeJob, forked: Fork, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.rendezvous._server.HELLO_S", 0.1)
    zero = forked(come, make_job(2), 0, 20)
    with line_to(make_job(2), wait_until) as line:
        line.settimeout(10)
        assert line.recv(1) == b""
    zero.kill()


def test_only_so_many_may_be_silent(
    make_job: MakeJob, forked: Fork, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.rendezvous._server.MOST_SILENT", 3)
    zero = forked(come, make_job(2), 0, 20)
    lines = [line_to(make_job(2), wait_until) for _ in range(4)]
    lines[3].settimeout(10)
    assert lines[3].recv(1) == b""
    for line in lines:
        line.close()
    zero.kill()


@pytest.mark.parametrize(
    ("size", "after"),
    [(4, (messages.WAITING, b"rank 3")), (3, (messages.WORLD, None))],
    ids=["hello", "world"],
)
def test_a_rank_that_dies_while_meeting_ends_it_for_all_who_came(
    make_job: MakeJob, forked: Fork, wait_until: Wait, size: int, after: tuple[int, bytes | None]
) -> None:
    job = make_job(size)
    others = [forked(come, job, rank) for rank in (0, 1)]
    with line_to(job, wait_until) as line:
        hello = messages.Hello(2, size, _core.version)
        reader, writer = os.pipe()
        messages.send(line, messages.HELLO, hello.pack(), [reader])
        taken = [reader, writer]
        while True:
            kind, body = messages.receive(line, time.monotonic() + 10, taken)
            if kind == after[0] and after[1] in (body, None):
                break
        for descriptor in taken:
            os.close(descriptor)
    for each in others:
        assert "rank 2 (process" in each.result(seconds=5)
    assert list(job.base.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_the_others_hear_when_rank_0_is_ended(
    make_job: MakeJob, forked: Fork, wait_until: Wait, number: signal.Signals
) -> None:
    job = make_job(3)
    zero = forked(come, job, 0)
    wait_until((job.path / "socket").exists)
    one = forked(come, job, 1)
    time.sleep(0.4)  # until it has been heard
    os.kill(zero.pid, number)
    expected = "" if number == signal.SIGINT else number.name
    assert expected in zero.result()
    assert one.result().startswith("RendezvousError: rank ")
    if number != signal.SIGKILL:
        assert list(job.base.iterdir()) == []


def test_what_a_killed_rank_0_left_is_cleaned_by_the_next_and_by_the_launcher(
    make_job: MakeJob, forked: Fork, wait_until: Wait
) -> None:
    job = make_job(2)
    for clean_by_next in (True, False):
        zero = forked(come, job, 0)
        wait_until((job.path / "socket").exists)
        forget(job)
        assert job.path.exists()  # it lives, so it is left alone
        zero.kill()
        assert job.path.exists()
        if clean_by_next:
            both = [forked(come, job, rank) for rank in (0, 1)]
            assert [each.result().split()[1] for each in both] == ["2", "2"]
        else:
            forget(job)
        assert list(job.base.iterdir()) == []


def give_away(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (lambda path: path.symlink_to(path.parent), "a link or a file"),
        (lambda path: path.write_text("x"), "a link or a file"),
        (lambda path: (path.mkdir(), path.chmod(0o755)), "others may enter it .mode 755."),
        (give_away, "user 12345"),
    ],
    ids=["link", "file", "open", "owner"],
)
def test_a_place_that_somebody_else_made_is_refused(
    make_job: MakeJob, plant: Callable[[Path], object], problem: str, rank: int
) -> None:
    job = make_job(2)
    try:
        plant(job.path)
    except PermissionError:
        pytest.skip("only root can give directories away")
    with pytest.raises(RendezvousError, match=problem):
        rendezvous(job, rank, timeout=1)
    forget(job)
    assert job.path.exists() or job.path.is_symlink()  # not ours to remove


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_not_reach_the_socket(
    make_job: MakeJob, forked: Fork, wait_until: Wait
) -> None:
    job = make_job(2)
    zero = forked(come, job, 0)
    wait_until((job.path / "socket").exists)
    name = f"{job.path.name}/socket"

    def intrude() -> str:
        os.chdir(job.base)  # so that only the last door can be the one that is shut
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(name)
        return "reached it"

    assert forked(intrude).result().startswith("PermissionError")
    zero.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_both_sides_ask_the_kernel_who_the_other_is(
    make_job: MakeJob, forked: Fork, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2)
    zero = forked(come, job, 0, 2.0)
    wait_until((job.path / "socket").exists)

    def pretend() -> str:
        place = RendezvousDirectory(job.path)
        place._open()
        address = place._address()
        (job.path / "socket").chmod(0o777)
        os.seteuid(65534)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(address)
        return f"heard {line.recv(1)!r}"

    assert forked(pretend).result() in (
        "heard b''",
        "PermissionError: [Errno 13] Permission denied",
    )
    zero.kill()
    monkeypatch.setattr(messages, "peer", lambda _: (1, 4711))
    with (
        RendezvousServer(RendezvousDirectory(job.path), 2, time.monotonic() + 5, 5),
        pytest.raises(RendezvousError, match="user 4711"),
    ):
        rendezvous(job, 1, timeout=1)


def test_long_paths_are_no_problem(tmp_path: Path, forked: Fork) -> None:
    base = tmp_path / ("x" * 120)
    base.mkdir()
    job = Job("test", 2, base)
    both = [forked(come, job, rank) for rank in (0, 1)]
    assert [each.result().split()[1] for each in both] == ["2", "2"]


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"no rendezvous in .*/nowhere: No such"):
        rendezvous(Job("test", 2, tmp_path / "nowhere"), 0, timeout=1)


def test_jobs_meet_apart(tmp_path: Path, forked: Fork) -> None:
    jobs = [Job(name, 2, tmp_path) for name in "abc"]
    ranks = [(forked(come, job, 0), forked(come, job, 1)) for job in jobs]
    tokens = [{each.result().split()[-1] for each in pair} for pair in ranks]
    assert [len(found) for found in tokens] == [1, 1, 1]
    assert len(set.union(*tokens)) == 3
