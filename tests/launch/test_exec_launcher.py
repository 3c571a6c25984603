"""`roundelay run` becomes torchrun or mpirun where several hosts are asked for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from roundelay.cli.run import command
from roundelay.engines.mpi.mpirun import find_mpirun
from roundelay.errors import InvalidArgumentError
from roundelay.launch import exec_launcher

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2", "--mpi"], "either torchrun's options or mpirun's"),
        (["--hostfile", "x"], "are for mpirun: add --mpi"),
        (["--mpi", "--mpi-args", "'"], "--mpi-args \"'\" can't be read"),
    ],
)
def test_wrong_use_is_named(options: list[str], message: str, script: str) -> None:
    done = CliRunner().invoke(command, [*options, script])
    assert done.exit_code == 2
    assert message in done.output


def test_all_of_torchruns_options_go_through() -> None:
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_endpoint": "node0:1", "rdzv_id": "x"}
    made = exec_launcher.torchrun_command(4, options, ["-m", "pkg"])
    assert made[1:] == [
        "-m", "roundelay.launch._torchrun", "--nproc-per-node", "4", "--nnodes", "1:2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:1", "--rdzv-id", "x", "-m", "pkg",
    ]  # fmt: skip


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
