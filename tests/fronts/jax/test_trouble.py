"""What goes wrong in a compiled program is raised as ours, on every rank, and never hangs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed: pip install jax", allow_module_level=True)

#: Each rank says what it met in programs that go wrong one after the other, each in a world of its
#: own; the last line of the program kills a rank in the middle of one.
PROGRAM = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import roundelay as rd
from roundelay.errors import RoundelayError


def told(comm, run):
    try:
        run(jnp.arange(3.0))
    except RoundelayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differs(comm):
    def program(x):
        if comm.rank:
            return rd.jax.all_reduce(x, "max", comm=comm)  # theirs
        return rd.jax.all_reduce(x, comm=comm)  # mine
    return told(comm, jax.jit(program))


def fails(comm):
    program = jax.jit(lambda x: jax.lax.scan(
        lambda c, _: (rd.jax.all_reduce(c, comm=comm), None), x, None, length=3)[0])
    program(jnp.arange(3.0))
    if comm.rank:
        raise ValueError("bad row")
    return told(comm, program)


def closed(comm):
    program = jax.jit(lambda x: rd.jax.all_reduce(x, comm=comm))
    program(jnp.arange(3.0))
    comm.close()
    return told(comm, program)


def late(comm):
    program = jax.jit(lambda x: rd.jax.all_reduce(x, comm=comm))
    turned = jax.jit(jax.grad(lambda x: rd.jax.scan(x, comm=comm).sum()))
    program(jnp.arange(3.0)), turned(jnp.arange(3.0))
    comm.timeout = 2
    if comm.rank:
        time.sleep(5)
    return told(comm, turned if backwards else program)


def dies(comm):
    program = jax.jit(lambda x: rd.jax.all_reduce(x, comm=comm))
    program(jnp.arange(3.0))
    if comm.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    text = told(comm, program)
    print(text, flush=True)


if __name__ == "__main__":
    case, engine, backwards = globals()[sys.argv[1]], sys.argv[2], sys.argv[3:]
    try:
        print("\\n".join(rd.run(case, ranks=2, engine=engine)))
    except Exception as error:
        print("run raised", type(error).__name__, str(error).splitlines()[0])
"""


def met(case: str, engine: str, folder: Path, *more: str) -> str:
    script = folder / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), case, engine, *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert "XlaRuntimeError" not in done.stderr, done.stderr
    assert "JaxRuntimeError" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_different_calls_name_both_lines(engine: str, tmp_path: Path) -> None:
    told = met("differs", engine, tmp_path)
    assert told.count("CollectiveMismatch: The ranks made different calls") == 2
    assert "op=max (one_shot) at" in told
    for mark in ("# theirs", "# mine"):
        line = PROGRAM[: PROGRAM.index(mark)].count("\n") + 1
        assert f"program.py:{line}" in told


def test_a_rank_that_raises_ends_the_program_of_the_other(tmp_path: Path) -> None:
    assert met("fails", "threads", tmp_path) == "run raised ValueError bad row\n"


@pytest.mark.parametrize("more", [[], ["backwards"]])
@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_a_timeout_that_is_set_later_holds_in_programs(
    engine: str, more: list[str], tmp_path: Path
) -> None:
    assert "CollectiveTimeout: Rank 0 waited 2 s for rank 1" in met("late", engine, tmp_path, *more)


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    told = met("dies", "shared_memory", tmp_path)
    assert "PeerLost: Rank 1 (process" in told
    assert "Its last call was all_reduce #1 float32[3]" in told
    assert "program.py:" in told


def test_a_closed_communicator_is_refused(tmp_path: Path) -> None:
    told = met("closed", "threads", tmp_path)
    assert told.count("InvalidArgumentError: This communicator is closed.") == 2


CROWD = """
import jax.numpy as jnp
import roundelay as rd

jnp.ones(3).sum().block_until_ready()


def body(comm):
    try:
        return rd.jax.all_reduce(jnp.ones(3), comm=comm).tolist()
    except rd.RoundelayError as error:
        return str(error)


print(rd.run(body, 3, "threads"))
"""


@pytest.mark.parametrize("threads", [2, 3])
def test_more_ranks_than_xla_has_threads_are_refused(threads: int) -> None:
    environ = {**os.environ, "PJRT_NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CROWD], capture_output=True, text=True, check=True, env=environ
    )
    right = "[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]"
    assert (done.stdout.strip() == right) == (threads >= 3), done.stdout
    assert done.stdout.count("Set PJRT_NPROC=3") == (0 if threads >= 3 else 3)


ODD = """
import jax, jax.numpy as jnp
import roundelay as rd

x, key = jnp.ones(3), jax.random.key(0)
ANYTHING = "text", None, [1, "a"], [[1], [1, 2]], {"a": x}, object(), key, jnp.ones(3, jnp.int4)


def told(call):
    try:
        return f"passed: {call()}"
    except rd.RoundelayError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"


def body(comm):
    calls = [
        lambda name=name, one=one: getattr(rd.jax, name)(one, comm=comm)
        for name in ("all_reduce", "all_gather", "broadcast", "scatter", "all_to_all", "scan")
        for one in ANYTHING
    ]
    calls += [lambda one=one: rd.jax.send(one, 0, comm=comm) for one in ANYTHING]
    calls += [lambda one=one: rd.jax.recv(one, 0, comm=comm) for one in ANYTHING]
    calls += [
        lambda one=one: rd.jax.sendrecv(x, 0, 0, like=one, comm=comm)
        for one in ANYTHING
        if one is not None
    ]
    for tree in ({"a": "text"}, [x, object()], (key,)):
        calls.append(lambda tree=tree: rd.jax.average_gradients(tree, comm=comm))
        calls.append(lambda tree=tree: rd.jax.broadcast_parameters(tree, comm=comm))
    for where in ([0], {}, "0", 0.0, None, comm.size, -1):
        calls.append(lambda where=where: rd.jax.send(x, where, comm=comm))
        calls.append(lambda where=where: rd.jax.sendrecv(x, where, 0, comm=comm))
        calls.append(lambda where=where: jax.jit(lambda: rd.jax.recv(x, where, comm=comm))())
    calls.append(lambda: jax.jit(lambda dst: rd.jax.send(x, dst, comm=comm))(0))
    calls.append(lambda: jax.grad(lambda y: (rd.jax.send(y, 0, comm=comm), y.sum())[1])(x))
    said = [told(call) for call in calls]
    return [*said, rd.jax.all_reduce(x, comm=comm).tolist()]


for said in rd.run(body, 2, "threads"):
    print(*said, sep="\\n")
"""


def test_what_is_no_array_or_rank_is_refused_by_name_and_the_group_goes_on() -> None:
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ODD], capture_output=True, text=True, check=False, env=environ
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    odd = [line for line in lines if not line.startswith("InvalidArgumentError: ")]
    assert odd == ["[2.0, 2.0, 2.0]"] * 2
    assert sum("rd.jax.all_reduce on rank 1 takes an array" in line for line in lines) == 6
    assert sum("jax.random.key_data" in line for line in lines) > 0
    assert sum("rd.jax.send at <string>" in line for line in lines) == 2


DEVICES = """
import jax, jax.numpy as jnp, numpy as np
import roundelay as rd
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def body(comm):
    call = lambda x: rd.jax.all_reduce(x, comm=comm)
    mesh = Mesh(np.array(jax.devices()), ("i",))
    over = NamedSharding(mesh, PartitionSpec("i"))
    there = jax.device_put(jnp.ones(4), over)
    said = []
    for program in (
        lambda: jax.jit(call)(there),
        lambda: call(there),
        lambda: jax.shard_map(call, mesh=mesh, in_specs=over.spec, out_specs=over.spec)(there),
        lambda: jax.pmap(call)(there.reshape(2, 2)),
    ):
        try:
            said.append(f"passed: {program()}")
        except rd.RoundelayError as error:
            said.append(str(error))
    for device in jax.devices():
        said.append(call(jax.device_put(jnp.ones(1), device)).item())
    return said


for said in rd.run(body, 2, "shared_memory"):
    print(*said, sep="\\n")
"""


def test_a_program_over_several_devices_is_refused_and_any_one_of_them_is_not() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, check=False, env=environ
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert [line for line in lines if "in a program over 2 devices" not in line] == ["2.0"] * 4
    assert len(lines) == 12
