"""Runs checks on a rank of MPI, writes what was wrong: `mpirun … mpi_checks.py FOLDER CHECK …`."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.mpi import Mpi
from roundelay.errors import CommunicationError
from roundelay.tuning import default_for

TIMEOUT_S = 60.0
SHOWN, LONG = 5, 500
Check = Callable[[Any], Iterator[str]]


def checks() -> dict[str, Check]:
    """Return all checks by name; their files lie beside this one."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        files = ("mpi_checks_calls", "mpi_checks_more", "wire_laws")
        modules = [importlib.import_module(name) for name in files]
    finally:
        sys.path.pop(0)
    return {
        name.removeprefix("check_"): check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_")
    }


def select_default(size: int, *, cores: int | None = None) -> Selection:
    """Choose by the table that this version ships, not by the host's own."""
    del cores
    return Selection(size, default_for(size))


def main(folder: Path, names: set[str]) -> None:
    """Run these checks; what follows one that broke the communicator is not run."""
    end = Mpi.of_world(select_default, TIMEOUT_S)
    comm = Communicator(end)
    found: dict[str, list[str]] = {}
    report = folder / f"{comm.rank}.json"
    for name, check in checks().items():
        if name not in names:
            continue
        began = time.monotonic()
        try:
            found[name] = [line[:LONG] for line in list(check(comm))[:SHOWN]]
            comm.barrier()
        except Exception as error:  # noqa: BLE001 - reported
            found[name] = [traceback.format_exc()]
            if isinstance(error, CommunicationError):
                break
        sys.stderr.write(f"rank {comm.rank}: {name} {time.monotonic() - began:.1f} s\n")
        report.write_text(json.dumps(found))
    report.write_text(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {*sys.argv[2:]})
