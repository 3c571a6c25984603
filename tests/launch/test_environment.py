"""What a launcher says by environment variables is read exactly, or refused by name and value."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from roundelay import _core
from roundelay.errors import InvalidArgumentError
from roundelay.launch.environment import (
    FOREIGN,
    base_directory,
    found_place,
    found_store,
    found_timeout,
    rank_environments,
    refuse_split,
)

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_alone_without_a_launcher() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place = found_place({"PATH": "/bin", "LOCAL_RANK": "0"})
    assert (place.rank, place.job.size) == (0, 1)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_what_roundelay_run_sets_is_what_init_reads(size: int) -> None:
    environments = rank_environments({}, size, job="x", port=4711, timeout=2.5)
    places = [found_place(each) for each in environments]
    assert [place.rank for place in places] == list(range(size))
    assert {place.job.size for place in places} == {size}
    assert len({place.job.path for place in places}) == 1
    assert {found_timeout(each) for each in environments} == {2.5}


def test_it_sets_all_that_torchrun_does() -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    names += "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT "
    names += "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE"
    for environment in rank_environments({}, 3, job="x", port=1, timeout=None):
        assert set(names.split()) <= environment.keys()
        assert "ROUNDELAY_TIMEOUT" not in environment


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_threads_of_numeric_libraries_share_the_cores(size: int) -> None:
    due = str(max(1, _core.available_cores() // size))
    (first, *_) = rank_environments({"HOME": "/x"}, size, job="x", port=1, timeout=None)
    assert (first["OMP_NUM_THREADS"], first["HOME"]) == (due, "/x")
    (first, *_) = rank_environments({"OMP_NUM_THREADS": "9"}, size, job="x", port=1, timeout=None)
    assert first["OMP_NUM_THREADS"] == "9"


BAD_NUMBERS = ["", " ", "x", "-1", "1.0", "0x1", "٣", "1 ", "1e3", "9" * 30, "\n1"]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_what_is_no_number_is_refused_by_name_and_value(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        found_place({**GOOD, name: value})
    assert f"{name}={value[:60]!r}" in str(caught.value)
    if name.startswith("LOCAL"):
        with pytest.raises(InvalidArgumentError, match="unset it"):
            found_place({name: value})  # though this process runs alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "RANK=4, but WORLD_SIZE=4: ranks go from 0 to 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number from 1"),
        ({"WORLD_SIZE": "2000"}, "WORLD_SIZE='2000'"),
        ({"WORLD_SIZE": None}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"RANK": None}, "WORLD_SIZE=4 is set, but RANK is not"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5, but WORLD_SIZE=4"),
    ],
)
def test_contradictions_are_named(changes: dict[str, str | None], message: str) -> None:
    environ = {**GOOD, **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        found_place({name: value for name, value in environ.items() if value is not None})


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"])
def test_a_loopback_is_one_host(address: str) -> None:
    assert found_place({**GOOD, "MASTER_ADDR": address}).by == "host"


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid", "x" * 400, "node0"])
def test_any_other_address_may_be_of_several_hosts(address: str) -> None:
    place = found_place({**GOOD, "MASTER_ADDR": address})
    assert (place.rank, place.job.size, place.by) == (1, 4, "store")
    assert (
        found_place({**GOOD, "MASTER_ADDR": address, "WORLD_SIZE": "1", "RANK": "0"}).by == "host"
    )


def test_fewer_ranks_here_than_in_all_are_several_hosts() -> None:
    assert found_place({**GOOD, "LOCAL_WORLD_SIZE": "2"}).by == "store"
    assert found_place({**GOOD, "LOCAL_WORLD_SIZE": "4"}).by == "host"


@pytest.mark.parametrize("agent", ["True", "False", None])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_store_is_served_by_torchrun_or_by_rank_0(agent: str | None, rank: int) -> None:
    environ = {**GOOD, "RANK": str(rank), "MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2"}
    if agent is not None:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = agent
    at = found_store(environ, found_place(environ))
    assert (at.host, at.port) == ("node0", 29500)
    assert at.serves == (rank == 0 and agent != "True")
    again = found_store({**environ, "TORCHELASTIC_RESTART_COUNT": "1"}, found_place(environ))
    assert again.corner != at.corner


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_PORT", "x"), ("MASTER_PORT", "0"), ("MASTER_PORT", "70000")]
)
def test_a_bad_port_of_the_store_is_named(name: str, value: str) -> None:
    environ = {**GOOD, "MASTER_ADDR": "node0", name: value}
    with pytest.raises(InvalidArgumentError, match=f"{name}='{value}'"):
        found_store(environ, found_place(environ))


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-x-1@1",
}  # fmt: skip


def test_all_ranks_of_mpirun_on_one_host_need_no_mpi() -> None:
    place = found_place(OPEN_MPI)
    assert (place.rank, place.job.size, place.by) == (2, 4, "host")
    assert place.job.path != found_place({**OPEN_MPI, "PMIX_NAMESPACE": "other@1"}).job.path


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"},
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.1"},
    ],
)
def test_what_the_variables_of_an_mpi_do_not_say_is_left_to_it(environ: dict[str, str]) -> None:
    assert found_place(environ).by == "mpi"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),  # which has no size
        (GOOD, "WORLD_SIZE=4"),  # with engine="mpi"
    ],
)
def test_ranks_of_a_launcher_that_mpi_does_not_know_do_not_run_alone(
    environ: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{named} says .*Other MPI 1.* of this proces"):
        refuse_split(environ, 1, "Other MPI 1")
    refuse_split(environ, 2, "Other MPI 1")
    refuse_split({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1, "Other MPI 1")
    refuse_split({}, 1, "Other MPI 1")


def test_torchruns_variables_go_before_those_of_an_mpi() -> None:
    assert found_place({**OPEN_MPI, **GOOD}).rank == 1


def test_where_all_ranks_are_local_any_address_will_do() -> None:
    environ = {**GOOD, "MASTER_ADDR": "192.0.2.1", "LOCAL_WORLD_SIZE": "4"}
    assert found_place(environ).job.size == 4


@pytest.mark.parametrize(
    "name",
    ["MASTER_ADDR", "MASTER_PORT", "ROUNDELAY_JOB", "TORCHELASTIC_RUN_ID",
     "TORCHELASTIC_RESTART_COUNT"],
)  # fmt: skip
def test_jobs_that_differ_in_anything_meet_apart(name: str) -> None:
    value = "localhost" if name == "MASTER_ADDR" else "7"
    assert found_place(GOOD).job.path == found_place(dict(GOOD)).job.path
    assert found_place({**GOOD, name: value}).job.path != found_place(GOOD).job.path


@pytest.mark.parametrize("name", FOREIGN)
def test_launchers_that_are_not_understood_are_pointed_out(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"{name}=3 is set.*RANK is not.*roundelay run"):
        assert found_place({name: "3"}).job.size == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found_place({**GOOD, name: "3"})


@pytest.mark.parametrize("value", ["", "x", "0", "-1", "nan"])
def test_a_bad_timeout_is_named(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ROUNDELAY_TIMEOUT"):
        found_timeout({"ROUNDELAY_TIMEOUT": value})


def test_ranks_look_in_the_users_own_directory_if_there_is_one(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    assert base_directory({"XDG_RUNTIME_DIR": str(own), "TMPDIR": str(other)}) == own
    assert base_directory({"XDG_RUNTIME_DIR": "/nowhere", "TMPDIR": str(other)}) == other
    assert base_directory({"XDG_RUNTIME_DIR": "", "TMPDIR": str(other)}) == other
    assert base_directory({}).is_dir()
