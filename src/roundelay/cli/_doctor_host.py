"""Checks of the host: what ranks need to start, and what makes them slow."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from roundelay import _core
from roundelay.cli._doctor_environment import Finding, checked
from roundelay.cli._leftovers import rendezvous_folders
from roundelay.communicator import Communicator
from roundelay.errors import RoundelayError, rank_count
from roundelay.launch import run
from roundelay.processes.amx import CURE, amx_traps, announces_amx
from roundelay.view.terminal_text import nbytes_text

GIB = 1 << 30
FEW_FILES, FEW_PROCESSES = 256, 256
SMALL_SHM = 64 << 20
SHM = "/dev/shm"  # noqa: S108 - looked at, never written
CGROUPS = Path("/sys/fs/cgroup")


def host_findings(size: int) -> Iterator[Finding]:
    """Look at everything that `size` ranks need on this host."""
    yield _native()
    yield _amx()
    yield _cores(size)
    yield _memory()
    yield _shm()
    yield _memfd(size)
    yield from _limits(size)
    yield _rendezvous()
    yield _peer_memory()
    yield _ranks(size)


def _native() -> Finding:
    sets = _core.instruction_sets()
    used = _core.instruction_set()
    said = f"{_core.version}, {_core.compiler()}, uses {used} of {' '.join(sets)}"
    if limit := os.environ.get("ROUNDELAY_MAX_ISA"):
        cure = "Unset it to have the quickest kernels of this CPU."
        return checked("native core", f"{said}, by ROUNDELAY_MAX_ISA={limit[:60]}", cure)
    cure = "" if used == sets[-1] else f"This CPU could do {sets[-1]}."
    return checked("native core", said, cure)


def _amx() -> Finding:
    if not announces_amx():
        return Finding("absent", "AMX", "not announced by this CPU; not needed")
    if importlib.util.find_spec("torch") is None:
        return checked("AMX", "announced; only PyTorch would use it, which is not there")
    if amx_traps():
        said = "announced, but it traps: PyTorch's bf16 layers die of SIGILL"
        return checked("AMX", said, f"{CURE[:1].upper()}{CURE[1:]}.")
    return checked("AMX", "announced, and PyTorch's bf16 layers run")


def _cores(size: int) -> Finding:
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota()
    said = f"{_core.available_cores()} usable of {os.cpu_count()} (affinity {usable}"
    said += f", quota {quota:g})" if quota is not None else ", no quota)"
    cure = ""
    if size > _core.available_cores():
        cure = (
            f"Ranks will take turns: correct, but slower. Give the job {size} cores "
            f"(docker --cpus={size}, taskset, --cpus-per-task), or start fewer ranks."
        )
    return checked("cores", f"{said}, for {rank_count(size)}", cure)


def _memory() -> Finding:
    free, left = memory_available(), memory_limit_left()
    known = [nbytes for nbytes in (free, left) if nbytes is not None]
    if not known:
        return checked("memory", "not known", "See that buffers fit twice.")
    limit = "no limit" if left is None else f"{nbytes_text(max(left, 0))} left of the limit"
    said = f"{nbytes_text(free or 0)} available, {limit} of the control group"
    cure = ""
    if min(known) < GIB:
        cure = "Large buffers may not fit; raise the container's limit (docker --memory=4g)."
    return checked("memory", said, cure)


def _shm() -> Finding:
    try:
        total, _, free = shutil.disk_usage(SHM)
    except OSError:
        return checked(SHM, "not there; not needed")
    said = f"{nbytes_text(free)} free of {nbytes_text(total)}; not needed"
    cure = "torch's data loaders and MPI may need more: docker --shm-size=1g."
    return checked(SHM, said, cure if free < SMALL_SHM else "")


def _memfd(size: int) -> Finding:
    try:
        world = _core.World.create(size)
    except (MemoryError, RuntimeError) as error:
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        cure = "Raise the container's memory limit, or start fewer ranks."
        if soft != resource.RLIM_INFINITY:
            cure = f"The address space is limited to {nbytes_text(soft)}: ulimit -v unlimited."
        return Finding("failed", "shared memory", str(error), cure)
    said = f"memfd works; {rank_count(size)} take {world.used >> 10} KiB"
    return checked("shared memory", said)


def _limits(size: int) -> Iterator[Finding]:
    for name, number, few, flag in (
        ("open files", resource.RLIMIT_NOFILE, max(FEW_FILES, 8 * size), "-n"),
        ("processes", resource.RLIMIT_NPROC, max(FEW_PROCESSES, 8 * size), "-u"),
    ):
        soft = resource.getrlimit(number)[0]
        said = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
        enough = soft == resource.RLIM_INFINITY or soft >= few
        yield checked(name, said, "" if enough else f"Allow {few} or more: ulimit {flag} {few}.")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "no limit" if soft == resource.RLIM_INFINITY else f"at most {nbytes_text(soft)}"
    yield checked("locked memory", f"{said}; not needed on one host")


def _rendezvous() -> Finding:
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
    return checked("rendezvous", f"{folder} takes sockets")


def _peer_memory() -> Finding:
    """Tell whether ranks can read one another's private memory, as they find out themselves."""

    def read(comm: Communicator) -> bool:
        comm.scatter(np.zeros((comm.size, 1 << 18)))
        return bool(comm._engine.native.reads_peers)  # type: ignore[attr-defined]  # noqa: SLF001

    name = "peer memory"
    try:
        able = all(_run(read, 2))
    except (OSError, MemoryError, RuntimeError, RoundelayError):
        return Finding("absent", name, "not known: ranks do not run here")
    if able:
        return checked(name, "ranks read one another's large arrays where they lie")
    if os.environ.get("ROUNDELAY_PEER_MEMORY") == "0":
        return checked(name, "not read, by ROUNDELAY_PEER_MEMORY=0", "Unset it: one copy less.")
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        scope = "not there"
    return checked(
        name,
        f"the kernel lets no rank read another's (ptrace scope: {scope}); copied twice instead",
        "For speed alone: docker --cap-add=SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=1.",
    )


def _run(body: Callable[[Communicator], bool], size: int) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bad tuning table has a line of its own
        return run(body, size, timeout=10.0)


def _ranks(size: int) -> Finding:
    """Do the real thing, small."""

    def reduce(comm: Communicator) -> bool:
        total = comm.all_reduce(np.full(1000, comm.rank + 1))
        return bool((total == size * (size + 1) // 2).all())

    try:
        right = _run(reduce, size)
    except (OSError, MemoryError, RuntimeError, RoundelayError) as error:
        return Finding("failed", "ranks", f"{type(error).__name__}: {error}", "See above.")
    said = f"{sum(right)} of {size} processes all-reduced, and got it right"
    if not all(right):
        return Finding("failed", "ranks", said, "Please report this: it must not happen.")
    return checked("ranks", said)


def cpu_quota() -> float | None:
    """Return how many cores' worth of time the control groups allow; None: as many as there are."""
    quotas = []
    for folder in _groups("cpu"):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":  # noqa: PLR2004 - quota and period
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return min(quotas, default=None)


def memory_limit_left() -> int | None:
    """Return how many bytes the control groups still allow; None where they set no limit."""
    rooms = []
    for folder in _groups("memory"):
        for most, used in (("memory.max", "memory.current"),
                           ("memory.limit_in_bytes", "memory.usage_in_bytes")):  # fmt: skip
            limit, now = _words(folder / most), _words(folder / used)
            # Version 1 writes "no limit" as a number near 2 to the 63rd.
            if limit and now and limit[0] != "max" and int(limit[0]) < 1 << 62:
                rooms.append(int(limit[0]) - int(now[0]))
    return min(rooms, default=None)


def memory_available() -> int | None:
    """Return the bytes that the kernel could give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from the innermost to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = CGROUPS / names if names else CGROUPS
        own = Path(os.path.normpath(f"{base}/{path}"))
        for folder in (own, *own.parents):
            if folder == base or base in folder.parents:
                yield folder


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []
