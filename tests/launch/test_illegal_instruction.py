"""A CPU whose AMX is announced but traps: found out in another process, told, and cured."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import roundelay as rd
from roundelay.cli._group import roundelay
from roundelay.errors import RankFailed
from roundelay.launch.ending import Ending, RankEnd
from roundelay.processes import amx

VARIABLE = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Pretend to be a machine whose CPU has these flags and whose bf16 layers do this."""
    monkeypatch.delenv(amx.VARIABLE, raising=False)

    def be(flags: str, layer: str) -> Path:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} avx2\n")
        tried = tmp_path / "tried"
        write = f"open({str(tried)!r}, 'a').write('x')\n"
        monkeypatch.setattr(amx, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(amx, "PROBE", [sys.executable, "-S", "-c", write + layer])
        amx.amx_traps.cache_clear()
        return tried

    yield be
    amx.amx_traps.cache_clear()


@pytest.mark.parametrize(
    ("flags", "layer", "traps", "tries"),
    [
        ("avx512f", DIES, False, 0),  # nobody else pays for the probe
        ("amx_tile amx_bf16", DIES, True, 1),
        ("amx_tile amx_bf16", "pass", False, 1),
        ("amx_tile", "raise SystemExit(1)", False, 1),  # no PyTorch
        ("amx_tile", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, 1),
    ],
)
def test_a_process_finds_out_once(
    machine: Machine, flags: str, layer: str, *, traps: bool, tries: int
) -> None:
    tried = machine(flags, layer)
    environment: dict[str, str] = {}
    for _ in range(3):
        assert amx.amx_traps() is traps
        amx.keep_off_amx(environment)
    assert environment == ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} if traps else {})
    assert (tried.read_text() if tried.exists() else "") == "x" * tries


def test_no_cpuinfo_and_no_probe_are_no_trap(machine: Machine, tmp_path: Path) -> None:
    machine("amx_tile", DIES)
    amx.PROBE[:] = [str(tmp_path / "no such python")]
    assert not amx.amx_traps()
    amx.CPUINFO.unlink()
    assert not amx.announces_amx()


@pytest.mark.parametrize("traps", [True, False])
def test_a_rank_that_dies_of_it_is_explained(machine: Machine, *, traps: bool) -> None:
    machine("amx_tile", DIES if traps else "pass")

    def work(comm: rd.Communicator) -> None:
        if comm.rank == 1:
            faulthandler.disable()  # it would write down the stack of a death that is wanted
            os.kill(os.getpid(), signal.SIGILL)
        comm.barrier()

    with pytest.raises(RankFailed, match=r"rank 1 .*SIGILL") as caught:
        rd.run(work, 2)
    said = Ending([RankEnd(1, -signal.SIGILL), RankEnd(0, 1, "PeerLost")]).summary()
    for text in (str(caught.value), said):
        assert (VARIABLE in text) is traps
        assert ("doctor" in text) is not traps
    assert said.startswith("rank 1 was killed by SIGILL")


def test_the_doctor_has_the_cure(machine: Machine) -> None:
    for layer, mark in ((DIES, "warning"), ("pass", "ok")):
        machine("amx_tile", layer)
        result = CliRunner().invoke(roundelay, ["doctor", "-n", "1", "--json"])
        (found,) = [f for f in json.loads(result.stdout)["findings"] if f["name"] == "AMX"]
        assert found["mark"] == mark
        assert (VARIABLE in found["cure"]) is (mark == "warning")


def test_the_layer_of_the_probe_is_one_that_pytorch_has() -> None:
    done = subprocess.run(amx.PROBE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
