"""The ranks of a communicator as compiled programs know them: a group of their own.

So calls of programs never mix with those that Python makes, whichever thread XLA makes them on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge

from roundelay import _core
from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.engines import CollectiveCall
from roundelay.engines.threads import Threads
from roundelay.errors import CommunicationError, InvalidArgumentError
from roundelay.fronts.jax_programs import ERROR_OF, kept_for
from roundelay.reductions import CODES, Array

__all__ = ["JaxGroup", "SourceLine", "array_of", "check_dtype", "group_of", "place_here"]

#: Collectives that bring, or give, a block for each rank.
MANY = ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter")
#: Those whose operand has a row for each rank.
ROWS = ("all_to_all", "reduce_scatter", "scatter")

# Lines of JAX say nothing to the user: who calls it stands above.
_core.skip_package(f"{Path(jax.__file__).parent}/")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The user's line that a call stands on."""

    code: CodeType
    offset: int
    line: int

    def __repr__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line}"


def place_here() -> SourceLine | None:
    """Return the innermost line outside this package."""
    found = _core.caller()
    return None if found is None else SourceLine(*found)


class JaxGroup:
    """Such a group as this rank has it; what primitives have as their parameter."""

    def __init__(self, comm: Communicator, *, backwards: bool = False) -> None:
        ranks = range(comm.size)
        made = comm.group(ranks[::-1] if backwards else ranks)
        if made is None:
            raise InvalidArgumentError(f"rd.jax: rank {comm.rank} is not in its own group.")
        made.follow_timeout(comm)
        self.comm, self._whole = made, comm
        self.rank, self.size = made.rank, made.size
        self._numbers: dict[object, int | None] = {}
        self._backwards: JaxGroup | None = None

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"

    def backwards(self, place: SourceLine | None) -> JaxGroup:
        """Return the same ranks in the other order: what a scan's transpose goes over."""
        if self._backwards is None:
            made = self._at(place, lambda: JaxGroup(self._whole, backwards=True))
            self._backwards, made._backwards = made, self
        return self._backwards

    def number(
        self, name: str, op: str, root: int, place: SourceLine | None, x: jax.core.ShapedArray
    ) -> int | None:
        """Return the number by which the native core knows a call; None if Python makes it."""
        key = name, op, root, place, x.shape, x.dtype
        if key not in self._numbers:
            blocks = self.size if name in MANY else 1
            count = math.prod(x.shape) // (self.size if name in ROWS else 1)
            item = x.dtype.itemsize
            call = CollectiveCall(
                name, x.dtype.name, item, count, count * item * blocks, _nothing, op=op, root=root
            )
            found = self._numbers[key] = self._at(place, lambda: self.comm._engine.bind(call))
            if found is not None:
                ERROR_OF[found] = self.error
        return self._numbers[key]

    def run(
        self, place: SourceLine | None, call: Callable[[Communicator], Array | None]
    ) -> Array | None:
        """Make a call from Python, for a program; keep what it raises for who ran the program."""
        result: Array | None = kept_for(self, lambda: self._at(place, lambda: call(self.comm)))
        return result

    @staticmethod
    def _at(place: SourceLine | None, work: Callable[[], Any]) -> Any:  # Any: whatever it gives
        """Do what is done on behalf of the user's line."""
        if place is None:
            return work()
        _core.work_for((place.code, place.offset, place.line))
        try:
            return work()
        finally:
            _core.work_for(None)

    def error(self, how: str) -> BaseException:
        """Return what the caller of a program is to see."""
        if how == "interrupted":
            return _core.take_interrupt() or KeyboardInterrupt()
        if how == "broken":
            return self.comm._engine.trouble()
        if how == "nested":
            return InvalidArgumentError(
                "A program with collectives was run in the middle of another one, on the same "
                "thread: by a signal handler or a finalizer. Let it make a note, and run the "
                "program when the other has returned."
            )
        if how == "closed":
            return InvalidArgumentError("This communicator is closed.")
        return CommunicationError(f"A collective of a program failed: {how}.")


def _nothing() -> None:
    """Finish nothing: XLA has the result."""


def group_of(call: str, comm: object) -> JaxGroup:
    """Return the group of a communicator, made by its first call; every rank makes that one."""
    if not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"rd.jax.{call} needs comm=, the communicator of rd.init() or rd.run, not {comm!r}."
        )
    kept = vars(comm)
    if "_jax_group" not in kept:
        _refuse_forked(call)
        if isinstance(comm._engine, Threads):
            _refuse_crowded(call, comm.size)
        kept["_jax_group"] = JaxGroup(comm)
    group: JaxGroup = kept["_jax_group"]
    return group


def array_of(call: str, x: Any, group: JaxGroup) -> Any:  # Any: an array, or what traces one
    """Return what a call was given as an array that it takes."""
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise InvalidArgumentError(
            f"rd.jax.{call} on rank {group.rank} takes an array, not {shown(x)}: {why}. For a tree "
            f"of arrays, call it by jax.tree.map."
        ) from None
    check_dtype(call, array.dtype, group)
    return array


def check_dtype(call: str, dtype: Any, group: JaxGroup) -> None:
    """Raise if the core does not know a dtype."""
    if dtype.name not in CODES:
        raise InvalidArgumentError(
            f"rd.jax.{call} on rank {group.rank} takes {', '.join(CODES)}, not {dtype}. Convert "
            f"it: x.astype(…), x.view(jnp.uint8) if its bytes are only moved, or of a key of "
            f"jax.random its jax.random.key_data."
        )


def _refuse_forked(call: str) -> None:
    """Refuse to go on where JAX began before a fork: without its threads it would hang."""
    if not xla_bridge.backends_are_initialized():
        return
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    if all(name.startswith(("python", "roundelay", "rank")) for name in names):
        raise InvalidArgumentError(
            f"rd.jax.{call}: JAX was used before this rank was forked, and hangs in a fork. "
            f"Use it only inside ranks, or start ranks by `roundelay run`, or rd.run(…, "
            f"engine='threads')."
        )


def _refuse_crowded(call: str, size: int) -> None:
    """Refuse more ranks that are threads than XLA has: each program keeps one until it ends."""
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    threads = int(asked) if asked.isdigit() else len(os.sched_getaffinity(0))
    if size <= threads:
        return
    if not xla_bridge.backends_are_initialized():
        os.environ["PJRT_NPROC"] = str(size)  # which XLA reads when it begins
        return
    raise InvalidArgumentError(
        f"rd.jax.{call}: {size} ranks are threads of one process, whose XLA began with {threads}, "
        f"and a program of each keeps one: they would wait for ever. Set PJRT_NPROC={size} before "
        f"the program starts, or use ranks that are processes: engine='shared_memory'."
    )


def made_by_python(name: str, op: str, root: int, x: Array) -> Callable[[Communicator], Any]:
    """Return the call of an engine that no compiled program can call by itself."""
    x = np.ascontiguousarray(x).reshape(np.shape(x))
    out = np.empty_like(x)
    if name == "barrier":
        return lambda comm: comm.barrier()
    if name == "broadcast":
        return lambda comm: comm.broadcast(x.copy(), root)
    if name in ("all_reduce", "scan"):
        return lambda comm: getattr(comm, name)(x, op, out=out)
    if name == "exscan":
        out[...] = 0
        return lambda comm: comm.exscan(x, op, out=out)
    if name == "reduce":
        return lambda comm: _or_zeros(comm.reduce(x, op, root, out=out), x.shape, x)
    if name == "gather":
        return lambda comm: _or_zeros(comm.gather(x, root), (comm.size, *x.shape), x)
    if name == "scatter":
        part = np.empty(x.shape[1:], x.dtype)
        return lambda comm: comm.scatter(x, root, out=part)
    if name == "reduce_scatter":
        return lambda comm: comm.reduce_scatter(x, op)
    return lambda comm: getattr(comm, name)(x)  # all_gather, all_to_all


def _or_zeros(found: Any, shape: tuple[int, ...], like: Array) -> Array:
    """Return a result, or zeros where the root alone has one."""
    return np.zeros(shape, like.dtype) if found is None else found
