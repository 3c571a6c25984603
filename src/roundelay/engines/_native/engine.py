"""The native core as an engine: shared flags, compiled programs, messages and the arena."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from roundelay import _core
from roundelay.engines._base import Engine
from roundelay.engines._call import (
    AXIS,
    ENDINGS,
    INNER_TAGS,
    CollectiveCall,
    FastPath,
    MessageCall,
    no_fast_path,
)
from roundelay.engines._native.arena import NativeArena
from roundelay.engines._native.labels import labelled
from roundelay.engines._native.lazily import Lazily
from roundelay.engines._native.pool import Pool
from roundelay.engines._native.programs import ProgramCache
from roundelay.engines._native.requests import (
    NativeCallRequest,
    NativeMessageRequest,
    RepeatedMessage,
    described,
    posted,
)
from roundelay.engines._native.trouble import (
    explain,
    own_doing,
    refuse_nested,
    slow_message,
    tell_broken,
    tell_slow,
    told_lost,
    warn_stopped,
)
from roundelay.engines._selector import Selector
from roundelay.errors import (
    CommunicationError,
    InvalidArgumentError,
    NoRoomError,
    rank_count,
)
from roundelay.live.world_report import left_over
from roundelay.processes.death import DEAD, LOSSES
from roundelay.processes.limits import limit_hit
from roundelay.reductions import Array

CLOSED = "This communicator is closed."
REGROUP = INNER_TAGS + (1 << 61)  # a tag that no other message has

# Source lines in errors are the caller's, never ours.
_core.set_package(str(Path(__file__).parents[2]) + "/")
_core.on_nested(refuse_nested)


class NativeEngine(Engine):
    """A rank of this host, in a group of the shared world.

    Ranks may be many, so what most of them never need is not made before it is needed.
    """

    told: CommunicationError | None = None  # of the root: what went wrong, once asked
    traces_calls = True
    rounds = True
    heard = False  # of the root: whether any group of this rank has told it
    _closed = False
    _ending = False
    _made: tuple[weakref.ref[NativeEngine], ...] = ()  # groups made from this one

    def __init__(
        self,
        world: _core.World,
        rank: int,
        selector: Selector,
        *,
        timeout: float = 60.0,
        _ranks: Sequence[int] | None = None,
        _block: _core.Block | None = None,
        _parent: NativeEngine | None = None,
        _serial: int = 0,
    ) -> None:
        self.world = world
        self.ranks = range(world.size) if _ranks is None else _ranks  # in the world
        self.rank, self.size = rank, len(self.ranks)
        me = weakref.ref(self)  # the native group must not keep its engine alive
        self.slow = partial(tell_slow, me)
        self.native: _core.Group | None = _core.Group(
            world,
            _block,  # the group's own memory, which goes back with the last rank
            rank,
            list(_ranks or ()),  # none are all
            on_slow=self.slow,
            on_broken=partial(tell_broken, me),
            parent=None if _parent is None else _parent._open(),
            serial=_serial,
        )
        self.at = self.native.at
        self._messages: _core.PointToPoint = (
            _core.PointToPoint(world, self.ranks[rank]) if _parent is None else _parent._messages
        )
        self._serial = _serial  # a number that no other group ever has
        self._above = None if _parent is None else _parent._root
        self.selector = selector
        self.timeout = timeout
        self.tracer = None if _parent is None else _parent.tracer
        self.fast_path = _core.FastPath(self.native)  # by which plain calls need no Python

    def start_trace(self, trace: _core.Trace) -> None:  # type: ignore[override] # the very class
        """Have the native core take down its calls; also those of groups made from now on."""
        self.tracer = trace
        self._open().set_trace(trace)

    def _limit_waiting(self, limit: float) -> None:
        self._open().set_timeout(limit)

    @property
    def _root(self) -> NativeEngine:  # the engine of all ranks, from which all others are made
        return self._above or self

    @Lazily
    def _sent(self) -> list[int]:  # bytes, by rank
        return [0] * self.size

    @Lazily
    def _registered(self) -> dict[tuple[str, int, int], int]:  # with so many programs made
        return {}

    @Lazily
    def _programs(self) -> ProgramCache:
        shelf = _core.Shelf(self.world, self.ranks[self.rank])
        return ProgramCache(self.rank, self.selector, shelf)

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Walk the program of the call on this thread."""
        native = self._open()  # first: while the interpreter ends, nothing can be compiled
        try:
            arguments = self._programs.arguments(call, algorithm)
            plain = algorithm is None and not (call.part_of or call.custom_op)
            key = call.collective, call.root, call.root | AXIS * call.axis
            if plain and self._registered.get(key) != self._programs.made:
                self._register(*key, arguments[0])
            native.call(*arguments)
        except _core.Broken:
            raise explain(self) from None
        except _core.Closed:
            raise InvalidArgumentError(CLOSED) from None

    def labelled_path(self, label: int) -> FastPath:
        """Put the label on what the native core runs by itself."""
        if self.fast_path is no_fast_path:
            return no_fast_path
        return labelled(self._open(), label)

    def _register(self, collective: str, root: int, word: int, ways: _core.Ways) -> None:
        """Give the native core the programs of plain calls, by size."""
        self._registered[collective, root, word] = self._programs.made
        self._open().register(*self._programs.plain_calls(collective, root, word, ways))

    def begin(self, call: CollectiveCall, algorithm: str | None) -> NativeCallRequest:
        """Have the native progress thread walk the program."""
        native = self._open()
        try:
            arguments = self._programs.arguments(call, algorithm)
            return NativeCallRequest(self, native.start(*arguments), arguments)
        except _core.Broken:
            raise explain(self) from None
        except _core.Closed:
            raise InvalidArgumentError(CLOSED) from None
        except OSError as error:
            raise limit_hit(f"start.{call.collective}", error) or error from None

    def bind(self, call: CollectiveCall) -> int:
        """Give the native core all of a call but its buffers."""
        ways, _, _, *what, _ = self._programs.arguments(call, None)
        return self._open().bind(ways, *what, not self.in_processes)

    def trouble(self) -> CommunicationError:
        """Read it in the shared world."""
        return explain(self)

    def post(self, message: MessageCall) -> NativeMessageRequest:
        """Put the message into the shared memory; in the background a native thread goes on."""
        return NativeMessageRequest(self, posted(self, message, described(self, message)))

    def repeated(self, message: MessageCall) -> RepeatedMessage:
        """Do all but the making of it now."""
        return RepeatedMessage(self, message)

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Let the first rank of every new group find room for it, and tell the others where."""
        first = ranks and ranks[0] == self.rank
        every = self._told_by_all(self._place(ranks) if first else np.zeros(2, np.uint64))
        if self.rank not in ranks:
            return None
        return self._grouped(ranks, *map(int, every[ranks[0]]))

    def regroup(self, ranks: Sequence[int]) -> Self | None:
        """Let the first of them find room, and tell the others where by a message to each."""
        if ranks[0] == self.rank:
            told = self._place(ranks)
            for other in ranks[1:]:
                self.post(MessageCall(told, "uint64", other, REGROUP, sends=True)).wait()
        else:
            told = np.zeros(2, np.uint64)
            self.post(MessageCall(told, "uint64", ranks[0], REGROUP, sends=False)).wait()
        return self._grouped(ranks, *map(int, told))

    def _place(self, ranks: Sequence[int]) -> Array:
        """Find room for a group: where it lies, and its serial; or 0, and the memory left."""
        place = self._room(_core.Group.bytes_for(len(ranks)), len(ranks))
        told = place, self.world.next_serial() if place else _core.available_memory()
        return np.array(told, np.uint64)

    def _grouped(self, ranks: Sequence[int], place: int, serial: int) -> Self:
        """Be in a group that lies at `place`; at 0 lies none, as so little memory was left."""
        nbytes = _core.Group.bytes_for(len(ranks))
        if place == 0:
            raise NoRoomError(nbytes, serial, f"a group of {rank_count(len(ranks))}")
        group = type(self)(
            self.world,
            list(ranks).index(self.rank),
            self.selector.for_size(len(ranks)),
            timeout=self.timeout,
            _ranks=[self.ranks[rank] for rank in ranks],
            _block=_core.Block(self.world, place, nbytes),
            _parent=self,
            _serial=serial,
        )
        self._made = (*(each for each in self._made if each() is not None), weakref.ref(group))
        return group

    def memory(self, nbytes: int) -> Array:
        """Return bytes in the shared arena, where collectives need no copy."""
        stride = -(-max(nbytes, 1) // 4096) * 4096
        room = self._room(stride * self.size, self.size) if self.rank == 0 else 0
        left = 0 if room else _core.available_memory()
        every = self._told_by_all(np.array([room, nbytes, left], np.uint64))
        sizes = [int(size) for size in every[:, 1]]
        if len(set(sizes)) > 1:
            raise InvalidArgumentError(
                f"empty needs one size on every rank, but the ranks ask for {sizes} bytes."
            )
        place = int(every[0, 0])
        if place == 0:
            raise NoRoomError(stride * self.size, int(every[0, 2]), "empty")
        block = _core.Block(self.world, place, stride * self.size)
        memory: Array = block.bytes(self.rank * stride, nbytes)
        return memory

    @Lazily
    def _pool(self) -> Pool:
        return Pool(self.world)

    def own_memory(self, nbytes: int) -> Array:
        """Return bytes in the shared arena, for this rank alone."""
        try:
            return self._root._pool.take(nbytes)
        except _core.Broken:
            raise explain(self) from None

    @Lazily
    def _arena(self) -> NativeArena:
        return NativeArena(weakref.ref(self), self.world)

    def arena(self, *, closed: bool = False) -> NativeArena:
        """Return that of the world, which is the same for all groups of this rank."""
        if not closed:
            self._open()
        return self._root._arena

    def moved(self) -> tuple[list[int], list[int]]:
        """Return what the programs of this rank moved, and what messages it has sent."""
        pairs = [self._open().moved(rank) for rank in range(self.size)]
        given = [pushed + sent for (_, pushed), sent in zip(pairs, self._sent, strict=True)]
        return [pulled for pulled, _ in pairs], given

    def _told_by_all(self, mine: Array) -> Array:
        every = np.empty((self.size, mine.size), mine.dtype)
        sizes = mine.itemsize, mine.size, every.nbytes
        call = CollectiveCall("all_gather", mine.dtype.name, *sizes, lambda: None, mine, every)
        self.run(call, None)
        return every

    def _room(self, nbytes: int, ranks: int) -> int:
        """Find room in the arena for a block that so many ranks hold; 0 when there is none."""
        try:
            return self.world.make_block(nbytes, ranks)
        except _core.OutOfMemory:
            return 0  # told to all ranks, so that all of them raise
        except _core.Broken:
            raise explain(self) from None

    def spare(self, loss: str) -> None:
        """Write it into the shared world, for who sees this rank go, and for its parent."""
        self.world.spare(self.ranks[self.rank], LOSSES.index(loss))
        if self._root.on_spare is not None:
            self._root.on_spare(loss)

    @property
    def losses(self) -> int:  # type: ignore[override] # where none are known, an attribute
        """How many ranks were lost without which the job goes on."""
        return self.world.losses

    def lost(self) -> dict[int, str]:
        """Look who is dead though nothing has gone wrong."""
        return {rank: told_lost(self.world, other) for rank, other in enumerate(self.ranks)
                if self.losses and self.world.life(other) == DEAD}  # fmt: skip

    def at_step(self, number: int) -> None:
        """Write it into the shared world."""
        self.world.set_step(self.ranks[self.rank], number + 1)

    def wait_unless_lost(self, request: Any, known: int) -> bool:  # Any: one of its own
        """Wait in the native core, which is woken by a loss."""
        return bool(request.wait_for_it(known))

    def fail(self, word: str, text: str) -> None:
        """Write it into the shared world, where all ranks see it at once."""
        self._root.heard = True
        self.world.fail(word, self.ranks[self.rank], text)

    def end_calls(self, how: str, *, together: bool, why: str = "") -> None:
        """Finish what was begun, show the end as a last call, and compare the one before it."""
        native = self.native
        if self._closed or native is None:
            return
        if why:
            self.world.set_raised(self.ranks[self.rank], why)
        native.close()  # which may be refused
        self._closed = True
        if self.world.foreign:
            return  # a child has begun nothing
        self._ending = True
        try:
            self._drain(native, how)
            native.end(ENDINGS.index(how), together, partial(warn_stopped, self))
            broken = native.failed
        except _core.Broken:
            broken = True
        finally:
            self._ending = False
        # What has gone wrong in the background is raised here, unless somebody has heard of it.
        if broken and not self._root.heard and not own_doing(self):
            raise explain(self)
        requests = self._messages.left_over() if together and not broken else []
        lost = self._root.lost()
        if requests := [request for request in requests if request[1] not in lost]:
            sys.stderr.write(left_over(self.ranks[self.rank], requests) + "\n")

    def close(self) -> None:
        """Finish what was begun, then say goodbye: who still needs this rank is told at once."""
        if self.native is None or self._ending:
            return  # another thread is at it, or was
        try:
            self.end_calls("closed", together=False)
        finally:
            if self._closed:
                self.fast_path = no_fast_path
                self.native.leave()
                if self._root is self:
                    self._messages.forget()
                    self.world.leave(self.ranks[self.rank])
                self.native = None

    def _drain(self, native: _core.Group, how: str) -> None:
        """Wait until nothing is under way, here and in groups made from this one."""
        for each in self._made:
            if (group := each()) is None:
                continue
            try:
                group.end_calls(how, together=False)
            finally:
                group.close()
        whole = self._root is self
        native.drain(whole)
        number, slow = None if whole else self._serial, partial(slow_message, self)
        self._messages.drain(native, number, self.timeout, slow)

    def _open(self) -> _core.Group:
        if self._closed or self.native is None:
            raise InvalidArgumentError(CLOSED)
        return self.native
