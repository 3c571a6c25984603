"""`roundelay doctor`: every trouble has a cure, no secret is shown, only our leftovers go."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.cli import _doctor_host
from roundelay.cli import _doctor_host as _host
from roundelay.cli._doctor_environment import Finding

Run = Callable[..., Result]
NAME = f"roundelay-{os.geteuid()}-{'0123abcd' * 3}"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let ranks meet in a folder of this test's, in a known environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def findings(result: Result) -> dict[str, Finding]:
    made = json.loads(result.stdout)["findings"]
    return {each["name"]: Finding(**each) for each in made}


def test_this_host_is_usable(run: Run) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["usable"] is True
    found = findings(result)
    assert found["ranks"].said.startswith("2 of 2")
    assert all(each.mark != "failed" for each in found.values())


@pytest.mark.parametrize("size", ["1", "3"])
def test_every_shape_of_output_tells_the_same(run: Run, size: str) -> None:
    names = list(findings(run("doctor", "-n", size, "--json")))
    table, paste = run("doctor", "-n", size), run("doctor", "-n", size, "--paste")
    assert table.exit_code == paste.exit_code == 0
    assert all(name in table.stdout and name in paste.stdout for name in names)
    assert paste.stdout.isascii()
    assert run("doctor", "-n", size, "--ascii").stdout.isascii()


def test_more_ranks_than_cores_is_a_warning_with_a_cure(run: Run) -> None:
    cores = len(os.sched_getaffinity(0))
    found = findings(run("doctor", "-n", str(cores + 1), "--json"))["cores"]
    assert found.mark == "warning"
    assert found.cure


def test_a_host_that_can_not_have_the_memory_is_not_usable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoWorld:
        @staticmethod
        def create(size: int) -> None:
            raise MemoryError(f"no room for {size} ranks")

    monkeypatch.setattr("roundelay._core.World", NoWorld)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["usable"] is False
    found = findings(result)
    assert [found[name].mark for name in ("shared memory", "ranks")] == ["failed", "failed"]
    assert found["shared memory"].cure
    assert run("doctor").exit_code == 1


def test_a_folder_that_can_not_be_written_is_named(
    run: Run, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "gone"))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    found = findings(result)["rendezvous"]
    assert found.mark == "failed"
    assert "gone" in found.said
    assert "XDG_RUNTIME_DIR" in found.cure


@pytest.mark.parametrize(
    ("limits", "mark"),
    [((None, None), "warning"), ((1 << 20, None), "warning"), ((1 << 40, 1 << 20), "warning"),
     ((1 << 40, 1 << 40), "ok"), ((1 << 40, None), "ok")],
)  # fmt: skip
def test_little_memory_is_a_warning(
    limits: tuple[int | None, int | None], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host, "memory_available", lambda: limits[0])
    monkeypatch.setattr(_host, "memory_limit_left", lambda: limits[1])
    assert _doctor_host._memory().mark == mark


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that this process is in the control group a/b of a tree of our own."""
    base = tmp_path / "cgroup"
    (base / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(_host, "CGROUPS", base)
    monkeypatch.setattr(_host, "_groups", lambda _: iter([base / "a" / "b", base / "a", base]))
    return base


def test_the_tightest_limit_of_all_control_groups_counts(groups: Path) -> None:
    assert (_host.cpu_quota(), _host.memory_limit_left()) == (None, None)
    (groups / "cpu.max").write_text("400000 100000\n")
    (groups / "a" / "cpu.max").write_text("150000 100000\n")
    (groups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (groups / "a" / "memory.max").write_text("1000\n")
    (groups / "a" / "memory.current").write_text("400\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert (_host.cpu_quota(), _host.memory_limit_left()) == (1.5, 600)


def test_launchers_are_shown_and_nothing_else_of_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_MCA_secret", "hush-hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    result = run("doctor", "--paste")
    assert "RANK=1 WORLD_SIZE=4" in result.stdout
    assert "hush" not in result.stdout + result.stderr
    monkeypatch.delenv("WORLD_SIZE")
    assert findings(run("doctor", "--json"))["launcher"].mark == "warning"


def test_a_bad_tuning_table_is_named(run: Run, runtime: Path) -> None:
    path = runtime / "config" / "roundelay" / "tuning.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = findings(run("doctor", "--json"))["tuning"]
    assert (found.mark, str(path) in found.said) == ("warning", True)


@pytest.fixture
def dead_and_alive(runtime: Path) -> Iterator[dict[str, Path]]:
    """Two rendezvous directories, one of which somebody holds, and what is not ours."""
    made = {
        "dead": runtime / NAME,
        "alive": runtime / f"{NAME[:-1]}f",
        "of another user": runtime / f"roundelay-{os.geteuid() + 1}-{'0' * 24}",
        "of another name": runtime / f"roundelay-{os.geteuid()}-mine",
    }
    for path in made.values():
        path.mkdir(mode=0o700)
    (made["dead"] / "socket").touch()
    held = os.open(made["alive"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    yield made
    os.close(held)


def test_only_what_dead_jobs_of_ours_left_is_removed(
    run: Run, dead_and_alive: dict[str, Path]
) -> None:
    found = findings(run("doctor", "--json"))["leftovers"]
    assert found.mark == "warning"
    assert str(dead_and_alive["dead"]) in found.said
    assert str(dead_and_alive["alive"]) not in found.said
    assert all(path.exists() for path in dead_and_alive.values())

    assert findings(run("doctor", "--clean", "--json"))["leftovers"].mark == "ok"
    there = {kind for kind, path in dead_and_alive.items() if path.exists()}
    assert there == {"alive", "of another user", "of another name"}
    assert findings(run("doctor", "--json"))["leftovers"].said == "none"


@pytest.mark.parametrize("size", ["0", "-1", "257", "x"])
def test_wrong_use_is_refused(run: Run, size: str) -> None:
    assert run("doctor", "-n", size).exit_code == 2
