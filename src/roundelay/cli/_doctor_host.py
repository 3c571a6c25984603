"""Checks of the host: what ranks need to start, and what makes them slow."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from roundelay import _core
from roundelay.cli import _host as host
from roundelay.cli._finding import Finding
from roundelay.cli._leftovers import rendezvous_folders
from roundelay.communicator import Communicator
from roundelay.errors import RoundelayError, rank_count
from roundelay.launch import run
from roundelay.processes.amx import CURE, amx_traps, announces_amx
from roundelay.view.terminal_text import nbytes_text

__all__ = ["host_findings"]

GIB = 1 << 30
FEW_FILES, FEW_PROCESSES = 256, 256
SMALL_SHM = 64 << 20
SHM = "/dev/shm"  # noqa: S108 - looked at, never written


def host_findings(size: int) -> Iterator[Finding]:
    """Look at everything that `size` ranks need on this host."""
    yield _native()
    yield _amx()
    yield _cores(size)
    yield _memory()
    yield _shm()
    yield _memfd(size)
    yield from _limits(size)
    yield _meeting()
    yield _ptrace()
    yield _ranks(size)


def _native() -> Finding:
    sets = _core.instruction_sets()
    used = _core.instruction_set()
    said = f"{_core.version}, {_core.compiler()}, uses {used} of {' '.join(sets)}"
    if limit := os.environ.get("ROUNDELAY_MAX_ISA"):
        cure = "Unset it to have the quickest kernels of this CPU."
        return Finding("warning", "native core", f"{said}, by ROUNDELAY_MAX_ISA={limit[:60]}", cure)
    if used != sets[-1]:
        return Finding("warning", "native core", said, f"This CPU could do {sets[-1]}.")
    return Finding("ok", "native core", said)


def _amx() -> Finding:
    if not announces_amx():
        return Finding("absent", "AMX", "not announced by this CPU; not needed")
    if importlib.util.find_spec("torch") is None:
        return Finding("ok", "AMX", "announced; only PyTorch would use it, which is not there")
    if amx_traps():
        said = "announced, but it traps: PyTorch's bf16 layers die of SIGILL"
        return Finding("warning", "AMX", said, f"{CURE[:1].upper()}{CURE[1:]}.")
    return Finding("ok", "AMX", "announced, and PyTorch's bf16 layers run")


def _cores(size: int) -> Finding:
    usable, quota = len(os.sched_getaffinity(0)), host.cpu_quota()
    said = f"{_core.available_cores()} usable of {os.cpu_count()} (affinity {usable}"
    said += f", quota {quota:g})" if quota is not None else ", no quota)"
    if size > _core.available_cores():
        return Finding(
            "warning",
            "cores",
            f"{said}, for {rank_count(size)}",
            f"Ranks will take turns: correct, but slower. Give the job {size} cores "
            f"(docker --cpus={size}, taskset, --cpus-per-task), or start fewer ranks.",
        )
    return Finding("ok", "cores", f"{said}, for {rank_count(size)}")


def _memory() -> Finding:
    free, left = host.memory_available(), host.memory_limit_left()
    known = [each for each in (free, left) if each is not None]
    if not known:
        return Finding("warning", "memory", "not known", "See that buffers fit twice.")
    limit = "no limit" if left is None else f"{nbytes_text(max(left, 0))} left of the limit"
    said = f"{nbytes_text(free or 0)} available, {limit} of the control group"
    if min(known) < GIB:
        return Finding(
            "warning",
            "memory",
            said,
            "Large buffers may not fit; raise the container's limit (docker --memory=4g).",
        )
    return Finding("ok", "memory", said)


def _shm() -> Finding:
    try:
        total, _, free = shutil.disk_usage(SHM)
    except OSError:
        return Finding("ok", SHM, "not there; not needed")
    said = f"{nbytes_text(free)} free of {nbytes_text(total)}; not needed"
    if free < SMALL_SHM:
        return Finding(
            "warning",
            SHM,
            said,
            "torch's data loaders and MPI may need more: docker --shm-size=1g.",
        )
    return Finding("ok", SHM, said)


def _memfd(size: int) -> Finding:
    try:
        world = _core.World.create(size)
    except (MemoryError, RuntimeError) as error:
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        cure = "Raise the container's memory limit, or start fewer ranks."
        if soft != resource.RLIM_INFINITY:
            cure = f"The address space is limited to {nbytes_text(soft)}: ulimit -v unlimited."
        return Finding("failed", "shared memory", str(error), cure)
    return Finding(
        "ok", "shared memory", f"memfd works; {rank_count(size)} take {world.used >> 10} KiB"
    )


def _limits(size: int) -> Iterator[Finding]:
    for name, number, few, flag in (
        ("open files", resource.RLIMIT_NOFILE, max(FEW_FILES, 8 * size), "-n"),
        ("processes", resource.RLIMIT_NPROC, max(FEW_PROCESSES, 8 * size), "-u"),
    ):
        soft = resource.getrlimit(number)[0]
        said = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
        if soft != resource.RLIM_INFINITY and soft < few:
            yield Finding("warning", name, said, f"Allow {few} or more: ulimit {flag} {few}.")
        else:
            yield Finding("ok", name, said)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "no limit" if soft == resource.RLIM_INFINITY else f"at most {nbytes_text(soft)}"
    yield Finding("ok", "locked memory", f"{said}; not needed on one host")


def _meeting() -> Finding:
    folder = rendezvous_folders(os.environ)[0]
    try:
        with tempfile.TemporaryDirectory(prefix="roundelay-doctor-", dir=folder) as own:
            descriptor = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.bind(f"/proc/self/fd/{descriptor}/socket")
            finally:
                os.close(descriptor)
    except OSError as error:
        return Finding(
            "failed",
            "rendezvous",
            f"{folder}: {error.strerror}",
            "Set XDG_RUNTIME_DIR or TMPDIR to a folder that you can write, on a local disk.",
        )
    return Finding("ok", "rendezvous", f"{folder} takes sockets")


def _ptrace() -> Finding:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        scope = "not there"
    return Finding("ok", "ptrace scope", f"{scope}; not needed, ranks read only what they share")


def _ranks(size: int) -> Finding:
    """Do the real thing, small."""

    def reduce(comm: Communicator) -> bool:
        total = comm.all_reduce(np.full(1000, comm.rank + 1))
        return bool((total == size * (size + 1) // 2).all())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bad tuning table has a line of its own
            right = run(reduce, size, timeout=10.0)
    except (OSError, MemoryError, RuntimeError, RoundelayError) as error:
        return Finding("failed", "ranks", f"{type(error).__name__}: {error}", "See above.")
    said = f"{sum(right)} of {size} processes all-reduced, and got it right"
    if not all(right):
        return Finding("failed", "ranks", said, "Please report this: it must not happen.")
    return Finding("ok", "ranks", said)
