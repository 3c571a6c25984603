"""A group for `ray.util.collective`, by the name ROUNDELAY: numpy arrays and CPU tensors in place.

Ray tells a group its name and its size, and nothing by which it could be told from an earlier one
of that name. So the ranks first find a token that only this group has.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.collective.backend_registry import BackendRegistry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.communicator.buffers import Bound, bind
from roundelay.errors import (
    CollectiveTimeout,
    InvalidArgumentError,
    PeerLost,
    RendezvousError,
    RoundelayError,
    ranks_text,
)
from roundelay.fronts.ray.store import RayStore, forget, join, wait_limit

__all__ = ["RoundelayGroup", "register"]

NAME = "ROUNDELAY"
OPS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
LOOK_S = 0.005

# Between the user's line and ours lies only Ray's, which says nothing to the user.
_core.skip_package(f"{Path(ray.__file__).parent}/")
ADVICE = (
    "See whether every actor makes the group, by the same name, or allow more time by setting "
    "ROUNDELAY_TIMEOUT for the actors."
)


def register() -> None:
    """Let this process use ROUNDELAY in `ray.util.collective`: Ray wants it in every process.

    Each actor calls it before it makes a group, or Ray calls it in all workers:
    `ray.init(runtime_env={"worker_process_setup_hook": "roundelay.ray.register"})`.
    """
    if not BackendRegistry().is_registered(NAME):
        register_collective_backend(NAME, RoundelayGroup)


class RoundelayGroup(BaseGroup):  # type: ignore[misc] # ray is optional, so without types
    """One actor's place in a group; Ray makes it, and wraps every tensor in a list."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._token = _agree(group_name, rank, world_size, wait_limit(None))
        try:
            self._comm = Communicator(join(self._token, rank, world_size))
        except RoundelayError:
            forget(self._token)
            raise

    @classmethod
    def backend(cls) -> str:
        """Return the name by which Ray knows it."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Tell that what has been imported is there."""
        return True

    def destroy_group(self) -> None:
        """Leave the group, waiting for nobody; the last one leaves nothing in Ray's store.

        Calls that did not match are told here at the latest. That a rank was lost, or did not come
        in time, is not told again: this is how to go on.
        """
        try:
            with contextlib.suppress(PeerLost, CollectiveTimeout):
                self._comm.end("closed", together=False)
        finally:
            store = RayStore()
            store.set(f"{self._token}/out/{self.rank}", b"")
            if store.check([f"{self._token}/out/{rank}" for rank in range(self.world_size)]):
                forget(self._token)

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        """Reduce over all ranks, in place."""
        self._comm.all_reduce(_one("allreduce", tensor), _op(allreduce_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Reduce to the root, in place there."""
        given = _one("reduce", tensor)
        self._comm.reduce(given, _op(reduce_options), reduce_options.root_rank)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        """Fill every rank's tensor with the root's."""
        self._comm.broadcast(_one("broadcast", tensor), broadcast_options.root_rank)

    def allgather(
        self,
        tensor_list: list[list[Any]],
        tensor: list[Any],
        allgather_options: Any = AllGatherOptions,
    ) -> None:
        """Fill the list with everybody's tensors."""
        del allgather_options
        given = bind("allgather", _one("allgather", tensor))
        outputs = self._list("allgather", tensor_list, given)
        for output in outputs:
            output.require_writable("allgather", "list of tensors")
        for output, row in zip(outputs, self._all_rows(given), strict=True):
            np.copyto(output.array, row)
            output.touched()

    def _all_rows(self, given: Bound) -> Any:
        return bind("allgather", self._comm.all_gather(given.given)).array

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:
        """Reduce the list over all ranks, tensor by tensor, and keep this rank's."""
        result = bind("reducescatter", _one("reducescatter", tensor))
        result.require_writable("reducescatter", "tensor")
        inputs = self._list("reducescatter", tensor_list, result)
        stacked = result.wrap(np.stack([given.array for given in inputs]))
        reduced = self._comm.reduce_scatter(stacked, _op(reducescatter_options))
        np.copyto(result.array, bind("reducescatter", reduced).array)
        result.touched()

    def send(self, tensor: list[Any], send_options: Any = SendOptions) -> None:
        """Send to one rank."""
        self._comm.send(_one("send", tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any = RecvOptions) -> None:
        """Receive from one rank, into the tensor."""
        self._comm.recv(_one("recv", tensor), recv_options.src_rank)

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        """Return when every rank has called it."""
        del barrier_options
        self._comm.barrier()

    def _list(self, call: str, lists: list[list[Any]], like: Bound) -> list[Bound]:
        """Look at a list of tensors, one for each rank and each like the one beside it."""
        found = [bind(call, each) for each in _one(call, lists)]
        odd = [
            f"{rank}: {each.dtype}{list(each.array.shape)}"
            for rank, each in enumerate(found)
            if (each.dtype, each.array.shape) != (like.dtype, like.array.shape)
        ]
        if odd or len(found) != self.world_size:
            raise InvalidArgumentError(
                f"{call} on rank {self.rank} takes a list of {self.world_size} tensors like the "
                f"one beside it, {like.dtype}{list(like.array.shape)}, but has {len(found)} "
                f"({', '.join(odd) or 'all like it'})."
            )
        return found


def _one(call: str, tensors: Sequence[Any]) -> Any:
    """Return the one tensor, or list of tensors, of this rank."""
    if len(tensors) != 1:
        raise InvalidArgumentError(
            f"{call} of {NAME} takes one tensor for each rank, not {len(tensors)}: the calls of "
            f"Ray that end in _multigpu are for the backend NCCL."
        )
    return tensors[0]


def _op(options: Any) -> str:
    return OPS[options.reduceOp.name]


def _agree(group_name: str, rank: int, size: int, timeout: float) -> str:
    """Return a token that all ranks of this group have, and no earlier group of its name.

    Every rank shows a number that it has just drawn, and rank 0 answers to that number: what is
    left of a group that was killed gets an answer that nobody reads.
    """
    if size == 1:
        return secrets.token_hex(16)
    store, deadline = RayStore(), time.monotonic() + timeout
    room = f"groups/{ray.get_runtime_context().namespace}/{group_name}/"
    who = f"rank {rank} of {size} of the group {group_name!r}"
    try:
        if rank == 0:
            return _answer_all(store, room, size, deadline, f"{who} waited {timeout:g} s")
        return _ask(store, room, rank, size, deadline, f"{who} waited {timeout:g} s")
    except RoundelayError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"{who} can't reach the others by Ray's key-value store: {error}."
        ) from None


def _answer_all(store: RayStore, room: str, size: int, deadline: float, waited: str) -> str:
    """Answer every rank that says hello, until all have read it; that is rank 0's part."""
    token, answered = secrets.token_hex(16), set[str]()
    try:
        while missing := [n for n in range(1, size) if not store.check([f"{token}/here/{n}"])]:
            for number in store.names(f"{room}hello/"):
                if number not in answered:
                    answered.add(number)
                    store.set(f"{room}answer/{number}", f"{token} {size}".encode())
            for rank in store.names(f"{token}/odd/"):
                told = store.get(f"{token}/odd/{rank}").decode()
                raise RendezvousError(_odd(size, rank, told))
            if time.monotonic() > deadline:
                raise RendezvousError(f"{waited}, but {ranks_text(missing)} did not come. {ADVICE}")
            time.sleep(LOOK_S)
    except RoundelayError:
        forget(token)
        raise
    finally:
        for number in answered:
            store.delete_key(f"{room}answer/{number}")
            store.delete_key(f"{room}hello/{number}")
    return token


def _ask(store: RayStore, room: str, rank: int, size: int, deadline: float, waited: str) -> str:
    """Say hello and wait for rank 0's answer; only one process can be a rank."""
    mine = secrets.token_hex(8)
    store.set(f"{room}hello/{mine}", b"")
    try:
        while (answer := store.look(f"{room}answer/{mine}")) is None:
            if time.monotonic() > deadline:
                raise RendezvousError(f"{waited} for rank 0. {ADVICE}")
            time.sleep(LOOK_S)
    finally:
        store.delete_key(f"{room}hello/{mine}")
    token, told = answer.decode().split()
    if told != str(size):
        store.set(f"{token}/odd/{rank}", str(size).encode())
        raise RendezvousError(_odd(int(told), str(rank), str(size)))
    if store.compare_set(f"{token}/here/{rank}", "", mine.encode()) != mine.encode():
        who = waited.rpartition(" waited")[0]
        raise RendezvousError(f"{who} is another process already. Give every actor its own rank.")
    return token


def _odd(size: int, rank: str, told: str) -> str:
    return (
        f"the ranks of a group were told different sizes: rank 0 has world_size={size}, and rank "
        f"{rank} has world_size={told}. Give all actors the same."
    )
