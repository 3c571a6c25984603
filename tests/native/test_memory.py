"""How much memory may still be asked for, read off the kernel's files as they are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

_core = pytest.importorskip("roundelay._core")
if not hasattr(_core, "available_memory"):
    pytest.skip("ranks of one host need Linux", allow_module_level=True)

import roundelay as rd  # noqa: E402 - only where it can be imported
from roundelay.errors import NoRoomError  # noqa: E402 - likewise
from roundelay.processes.world import make_world  # noqa: E402 - likewise

MIB = 1 << 20
MACHINE = 1000 * MIB
V1, V2 = "memory", ""
NAMES = {
    V1: "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file total_active_file",
    V2: "memory.max memory.current inactive_file active_file",
}
NONE: dict[str, int | str] = {V1: 9223372036854771712, V2: "max"}


def host(root: Path, version: str, group: str, mounted: str = "/") -> Path:
    """Make a machine with one control group hierarchy; return where that is mounted."""
    at = "/sys/fs/cgroup" + (f"/{version}" if version else "")
    own = f"5:cpu,cpuacct:/elsewhere\n4:memory:{group}\n" if version else f"0::{group}\n"
    kind = "cgroup cgroup rw,memory" if version else "cgroup2 cgroup2 rw,nsdelegate"
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(own)
    (proc / "mountinfo").write_text(
        f"30 1 8:1 / / rw - ext4 /dev/sda rw\n31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        f"35 31 0:32 {mounted} {at} rw,relatime shared:9 - {kind}\n"
    )
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {MACHINE >> 10} kB\n")
    folder = root / at[1:]
    folder.mkdir(parents=True)
    return folder


def limit(folder: Path, version: str, most: int | str, used: int, cache: int = 0) -> None:
    """Give a control group a limit, and say how much of it is used, and how much of that cache."""
    folder.mkdir(parents=True, exist_ok=True)
    most_name, used_name, inactive, active = NAMES[version].split()
    (folder / most_name).write_text(f"{most}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 1\n{inactive} {cache}\n{active} {cache}\n")


def available(root: Path) -> int:
    return int(_core.available_memory(str(root)))


@pytest.mark.parametrize("version", [V1, V2])
def test_the_tightest_of_all_groups_counts(tmp_path: Path, version: str) -> None:
    top = host(tmp_path, version, "/a/b")
    assert available(tmp_path) == MACHINE
    limit(top / "a/b", version, NONE[version], 3 * MIB)
    limit(top / "a", version, NONE[version], 3 * MIB)
    assert available(tmp_path) == MACHINE
    limit(top / "a/b", version, 500 * MIB, 100 * MIB)
    assert available(tmp_path) == 400 * MIB
    limit(top / "a", version, 300 * MIB, 200 * MIB)
    assert available(tmp_path) == 100 * MIB
    limit(top, version, 70 * MIB, 20 * MIB)
    assert available(tmp_path) == 50 * MIB
    limit(top / "other", version, MIB, MIB)
    assert available(tmp_path) == 50 * MIB


@pytest.mark.parametrize("version", [V1, V2])
def test_what_is_only_cache_is_no_burden(tmp_path: Path, version: str) -> None:
    top = host(tmp_path, version, "/a")
    limit(top / "a", version, 100 * MIB, 90 * MIB, cache=30 * MIB)
    assert available(tmp_path) == 70 * MIB
    limit(top / "a", version, 100 * MIB, 90 * MIB, cache=80 * MIB)
    assert available(tmp_path) == 100 * MIB
    limit(top / "a", version, 100 * MIB, 200 * MIB)  # lowered under a running job
    assert available(tmp_path) == 0


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("group", "mounted"),
    [("/docker/c0ffee", "/docker/c0ffee"), ("/", "/"), ("/../../elsewhere", "/"),
     ("/docker/c0ffee/inner", "/docker/c0ffee"), ("/moved", "/docker/c0ffee")],
)  # fmt: skip
def test_a_container_sees_its_own_part(
    tmp_path: Path, version: str, group: str, mounted: str
) -> None:
    top = host(tmp_path, version, group, mounted)
    limit(top, version, 64 * MIB, 24 * MIB)
    assert available(tmp_path) == 40 * MIB


@pytest.mark.parametrize("missing", ["cgroup", "mountinfo", "both"])
def test_a_machine_without_groups_has_what_it_has(tmp_path: Path, missing: str) -> None:
    limit(host(tmp_path, V2, "/a") / "a", V2, MIB, 0)
    for name in ("cgroup", "mountinfo") if missing == "both" else (missing,):
        (tmp_path / "proc/self" / name).unlink()
    assert available(tmp_path) == MACHINE


def test_what_this_machine_says_is_above_nothing_and_no_more_than_it_has() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert 0 < _core.available_memory() <= total * 1024


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_more_than_there_is_is_told_to_all_and_breaks_nothing(engine: str) -> None:
    """Nothing is touched to find it out, so nobody is killed for it."""
    beyond = _core.available_memory() // 4  # for each of four ranks, which is all and no margin

    def work(comm: rd.Communicator) -> tuple[str, float]:
        with pytest.raises(NoRoomError, match=r"empty: .* more bytes; \d+ are available") as found:
            comm.empty(beyond + (1 << 20), "u1")
        assert found.value.available is not None
        return str(found.value), float(comm.all_reduce(comm.empty(1000) + 1)[0])

    results = rd.run(work, 4, engine)
    assert len({message for message, _ in results}) == 1
    assert [total for _, total in results] == [4.0] * 4


def test_a_job_that_is_too_large_says_how_much_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise _core.OutOfMemory

    monkeypatch.setattr(_core.World, "create", none)
    with pytest.raises(NoRoomError, match="a job of 300 ranks: this host has no room") as found:
        make_world(300)
    assert found.value.nbytes == _core.World.bytes_for(300)
