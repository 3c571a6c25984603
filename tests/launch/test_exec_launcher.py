"""`roundelay run` becomes torchrun or mpirun where several hosts are asked for."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from roundelay.cli import run as run_command
from roundelay.cli.run import command
from roundelay.engines.mpi.mpirun import HOSTFILES, clean_environment, find_mpirun, is_open_mpi
from roundelay.errors import InvalidArgumentError
from roundelay.launch import exec_launcher
from roundelay.launch.host_list import all_here, read_hosts

SCRIPT = """
import os, sys
import numpy as np, roundelay as rd
comm = rd.init()
said = comm.rank, comm.size, comm.timeout, comm.all_reduce(np.ones(1))[0], sys.argv[1:]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # at once: ranks share one output
"""


def run(*arguments: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, "-m", "roundelay", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


DUE = [f"{rank} 2 33.0 2.0 ['--nnodes', '7']" for rank in range(2)]


def test_torchrun_starts_what_it_is_asked_to(script: str) -> None:
    if find_spec("torch") is None:
        pytest.skip("no torch")
    options = ("--nnodes", "1", "--master_port", "29541", "--timeout", "33", "-n", "2")
    code, printed, errors = run(*options, script, "--nnodes", "7")
    assert (code, printed) == (0, DUE), errors


def test_mpirun_starts_what_it_is_asked_to(script: str) -> None:
    try:
        find_mpirun()
    except InvalidArgumentError as error:
        pytest.skip(str(error))
    code, printed, errors = run("--mpi", "--timeout", "33", "-n", "2", script, "--nnodes", "7")
    assert (code, printed) == (0, DUE), errors


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("0", r"the hosts did not come together: .*1/2 clients joined"),
        ("1", r"this host tried for 2 s to find the others: nothing listens at MASTER_PORT"),
    ],
)
def test_hosts_that_do_not_come_are_told_of_in_time_and_in_one_line(
    node: str, why: str, script: str
) -> None:
    if find_spec("torch") is None:
        pytest.skip("no torch")
    port = "29547" if node == "0" else "29548"
    place = ("--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1")
    code, printed, errors = run("--timeout", "2", *place, "--master-port", port, "-n", "1", script)
    assert (code, printed) == (1, [])
    assert re.fullmatch(f"roundelay: {why}.*\n", errors), errors


@pytest.mark.parametrize("hosts", ["", " ", ":", "localhost, "])
def test_a_list_of_hosts_with_none_in_it_is_refused(hosts: str, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roundelay", "run", "-H", hosts, script],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2
    assert f"-H {hosts!r}" in done.stderr
    assert "is no host with its number of ranks" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2", "--mpi"], "either torchrun's options or"),
        (["--nnodes", "2", "-H", "localhost:2"], "either torchrun's options or"),
        (["--mpi-args", "--bind-to none"], "--mpi-args is for mpirun: add --mpi"),
        (["--mpi", "--shutdown-timeout", "5"], "mpirun ends its ranks as it is used to"),
        (["-np", "5", "-H", "localhost:2,127.0.0.1:2"], "more than the 4 ranks"),
        (["--mpi", "--mpi-args", "'"], "--mpi-args \"'\" can't be read"),
    ],
)
def test_wrong_use_is_named(options: list[str], message: str, script: str) -> None:
    done = CliRunner().invoke(command, [*options, script])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("hosts", ["", ",", "a:0", "a:x", "a b:2", "a:-1", "a:2:3", "[::1:2"])
def test_what_is_no_list_of_hosts_is_named(hosts: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Write node0:4,node1:4"):
        read_hosts(hosts)


def test_hosts_by_their_own_names_are_here() -> None:
    own = socket.gethostname()
    for here in (own, own.partition(".")[0], "localhost", "127.0.0.1", "[::1]"):
        assert all_here(read_hosts(f"{here}:2,localhost"))
    assert not all_here(read_hosts(f"{own}:2,elsewhere.invalid:2"))


@pytest.mark.parametrize(
    ("options", "count", "words"),
    [
        (["-np", "4", "-H", "elsewhere:2,node1:2"], "4", ["--host", "elsewhere:2,node1:2"]),
        (["-H", "elsewhere:2,localhost:3"], "5", ["--host", "elsewhere:2,localhost:3"]),
        (["-np", "3", "--hosts", "elsewhere,node1"], "3", ["--host", "elsewhere,node1"]),
        (["--mpi", "-n", "3", "--host", "localhost:4"], "3", ["--host", "localhost:4"]),
        (["-np", "2", "--hostfile", "list"], "2", ["--hostfile", "list"]),
    ],
)
def test_other_hosts_are_mpiruns_as_they_are_horovodruns(
    options: list[str], count: str, words: list[str], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def note(command: list[str], _: Mapping[str, str]) -> NoReturn:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr(run_command, "exec_launcher", note)
    monkeypatch.setattr(exec_launcher, "find_mpirun", lambda: "/bin/true")
    monkeypatch.chdir(Path(script).parent)
    Path("list").write_text("node0 slots=2\n")
    CliRunner().invoke(command, [*options, script, "-H", "7"])
    expected = ["/bin/true", "-n", count, *words, sys.executable, script, "-H", "7"]
    assert started == [expected]


#: As the MPI operator and Trainer's MPI runtime set them in the pod of the launcher.
OPERATORS = {
    "OpenMPI": {
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": "2",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    },
    "Intel": {
        "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
        "I_MPI_PERHOST": "2",
    },
    "MPICH": {
        "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
        "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
    },
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("words", "named"),
    [([], ""), (["--bind-to", "none"], ""), (["--hostfile", "mine"], "file"),
     (["-H", "a"], "host"), (["-f", "mine"], "file")],
)  # fmt: skip
def test_mpirun_is_given_the_operators_hostfile_unless_hosts_are_named(
    operator: str, words: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_launcher, "find_mpirun", lambda: "/bin/true")
    set_by_it = OPERATORS[operator]
    environ = clean_environment({**set_by_it, "PMI_RANK": "0"}, elsewhere=True)
    assert environ.items() >= set_by_it.items()
    assert "PMI_RANK" not in environ
    made = exec_launcher.mpirun_command(4, words, ["x.py"], environ)
    assert made[3:] == [
        *([] if named else ["--hostfile", "/etc/mpi/hostfile"]), *words, sys.executable, "x.py",
    ]  # fmt: skip
    # What is started for this host alone knows nothing of the others.
    assert not {*HOSTFILES, "HYDRA_LAUNCH_EXTRA_ARGS"} & clean_environment(set_by_it).keys()


SSH = """#!/bin/bash
# Stands in for ssh: a host, and a command for a shell there that has none of our variables.
while [[ "$1" == -* ]]; do [[ "$1" == -o ]] && options="$options $2" && shift; shift; done
echo "$1$options" >> {log}
shift
exec env -i HOME="$HOME" PATH="$PATH" bash -c "$*"
"""
IN_PODS = """
import os
names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "ROUNDELAY_TIMEOUT"
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""


def test_an_mpijobs_ranks_are_in_the_pods_of_its_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI 5 itself reads none of what the operator sets, and starts all in the launcher's."""
    try:
        open_mpi = is_open_mpi(find_mpirun())
    except InvalidArgumentError as error:
        pytest.skip(str(error))
    if not open_mpi:
        pytest.skip("another MPI than Open MPI")
    hosts, log, ssh = tmp_path / "hostfile", tmp_path / "log", tmp_path / "ssh"
    pods = [f"job-worker-{number}.job.default.svc" for number in range(2)]
    hosts.write_text("".join(f"{pod} slots=2\n" for pod in pods))
    ssh.write_text(SSH.format(log=log))
    ssh.chmod(0o700)
    (tmp_path / "script.py").write_text(IN_PODS)
    set_by_it = {**OPERATORS["OpenMPI"], "OMPI_MCA_orte_default_hostfile": str(hosts)}
    for name, value in {**set_by_it, "OMPI_MCA_plm_rsh_agent": str(ssh)}.items():
        monkeypatch.setenv(name, value)
    code, printed, errors = run("--mpi", "--timeout", "33", "-n", "4", str(tmp_path / "script.py"))
    assert (code, printed) == (0, ["4 2 33.0"] * 4), errors
    assert sorted(log.read_text().splitlines()) == [f"{pod} ConnectionAttempts=10" for pod in pods]


def test_all_of_torchruns_options_go_through() -> None:
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_endpoint": "node0:1", "rdzv_id": "x"}
    made = exec_launcher.torchrun_command(4, options, ["-m", "pkg"])
    assert made[1:] == [
        "-m", "roundelay.launch._torchrun", "--nproc-per-node", "4", "--nnodes", "1:2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:1", "--rdzv-id", "x", "-m", "pkg",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["foo", "C10D", " c10d"])
def test_hosts_that_can_not_meet_are_told_by_what_they_can(name: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"PET_RDZV_BACKEND .* static, c10d, etcd"
    ) as met:
        exec_launcher.torchrun_command(2, {"nnodes": "2", "rdzv_backend": name}, ["x.py"])
    assert repr(name) in str(met.value)


@pytest.mark.parametrize(("found", "takes"), [("2.13.0+cpu", ""), ("2.15.0", "6"), ("3.0", "6")])
def test_the_time_to_end_is_torchruns_where_it_can_be_told(
    found: str, takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_launcher, "version", lambda _: found)
    asked = partial(exec_launcher.torchrun_command, 2, {}, ["x.py"], shutdown_timeout=5.5)
    if takes:
        assert asked()[5:7] == ["--shutdown-timeout", takes]
        return
    with pytest.raises(InvalidArgumentError, match=r"gives them 30 s in torch 2\.13"):
        asked()


def test_without_torch_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_launcher, "find_spec", lambda _: None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'roundelay\[torch\]'"):
        exec_launcher.torchrun_command(2, {"nnodes": "2"}, ["x.py"])


JOINED = """
import importlib.util, os
from pathlib import Path
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.hierarchical import Hierarchical, join
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import JobPlace
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
join.host_identity = lambda: f"host {{rank // 2}}"  # said to be elsewhere: MPI knows no better
spec = importlib.util.spec_from_file_location("surface", {surface!r})
surface = importlib.util.module_from_spec(spec)
spec.loader.exec_module(surface)
place = JobPlace(rank, Job("", 1, Path()), "mpi")
engine = Hierarchical.join(place, select=Selection, timeout=60)
comm = Communicator(engine)
found = surface.failures(comm)
print(type(engine).__name__, found)
comm.close()
"""


def test_hosts_are_joined_by_mpi_where_that_started_the_ranks(tmp_path: Path) -> None:
    try:
        find_mpirun()
    except InvalidArgumentError as error:
        pytest.skip(str(error))
    surface = Path(__file__).parent.parent / "engines" / "surface.py"
    assert importlib.util.spec_from_file_location("surface", surface) is not None
    (tmp_path / "script.py").write_text(JOINED.format(surface=str(surface)))
    code, printed, errors = run("--mpi", "-n", "3", str(tmp_path / "script.py"))
    assert (code, printed) == (0, ["Hierarchical []"] * 3), errors
