"""What every front of Horovod's has: who is who, what is built in, and process sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roundelay.arguments import shown, truth
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import session
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.fronts.horovod.operation import Operation, Terms

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "barrier",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank",
    "remove_process_set", "rocm_built", "shutdown", "size", "start", "start_timeline",
    "stop_timeline",
]  # fmt: skip

Average, Sum, Adasum, Min, Max, Product = range(6)


class ProcessSet:
    """Ranks that make operations together; `hvd.init` or `add_process_set` tells all of it."""

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            found = sorted(ranks)
        except TypeError:
            found = [-1]
        if any(type(one) is not int or one < 0 for one in found):
            raise InvalidArgumentError(f"ProcessSet takes a list of ranks, not {ranks!r}.")
        self.ranks: list[int] = found

    def size(self) -> int | None:
        """Return how many ranks it has; None before it is known to all."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in it; None before it is known to all, or outside."""
        if self.process_set_id is None or not self.included():
            return None
        return self.ranks.index(rank())

    def included(self) -> bool | None:
        """Tell whether this rank is in it."""
        return rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def start(
    stand_in: Callable[[Terms], Operation],
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the ranks that a launcher started; without one, this is rank 0 of 1."""
    if comm is not None and not isinstance(comm, (list, tuple, range)):
        raise UnsupportedOperationError(
            "hvd.init(comm=…) takes a list of ranks; of an MPI communicator only rd.init() with "
            "engine='mpi' knows."
        )
    if process_sets is not None and not isinstance(process_sets, (list, tuple, str)):
        raise InvalidArgumentError(
            f"hvd.init(process_sets=…) takes a list of hvd.ProcessSet, not {shown(process_sets)}."
        )
    fresh = not session.started()
    began = session.begin(stand_in, comm)
    global_process_set.ranks = list(range(began.size))
    if fresh and process_sets is not None and not isinstance(process_sets, str):
        for one in process_sets:
            add_process_set(one)


def shutdown() -> None:
    """End what `init` began; what others still wait for fails there. `init` may follow."""
    session.end()


def is_initialized() -> bool:
    """Tell whether `init` was called."""
    return session.started()


def rank() -> int:
    """Return the number of this rank."""
    return session.current("rank()").rank


def size() -> int:
    """Return the number of ranks."""
    return session.current("size()").size


def local_rank() -> int:
    """Return the number of this rank among those of its host."""
    return session.current("local_rank()").local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return session.current("local_size()").local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a rank with this local number."""
    return session.current("cross_rank()").cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local number."""
    return session.current("cross_size()").cross_size


def is_homogeneous() -> bool:
    """Tell whether all hosts have the same number of ranks."""
    return session.current("is_homogeneous()").homogeneous


def mpi_built() -> bool:
    """Tell whether Horovod's MPI is in here: no, the engines take its place."""
    return False


def gloo_built() -> bool:
    """Tell whether operations work without MPI, which is what callers ask by this: yes."""
    return True


def mpi_enabled() -> bool:
    """Tell whether Horovod's MPI runs: no."""
    return False


def gloo_enabled() -> bool:
    """Tell whether operations run without MPI: yes."""
    return True


def mpi_threads_supported() -> bool:
    """Refuse, as Horovod does where its MPI does not run."""
    raise InvalidArgumentError(
        "hvd.mpi_threads_supported() needs Horovod's MPI, which is not here."
    )


def nccl_built() -> int:
    """Return the version of NCCL that operations use: none, GPU tensors go through the host."""
    return 0


def cuda_built() -> bool:
    """Tell whether operations run on GPUs: no, GPU tensors go through the host."""
    return False


def ddl_built() -> bool:
    """Tell whether IBM's DDL is in here: no."""
    return False


def ccl_built() -> bool:
    """Tell whether oneCCL is in here: no."""
    return False


def rocm_built() -> bool:
    """Tell whether ROCm is in here: no."""
    return False


def start_timeline(file_path: str, *, mark_cycles: bool = False) -> None:
    """Refuse: there are no cycles to mark."""
    del mark_cycles
    raise UnsupportedOperationError(
        f"hvd.start_timeline({file_path!r}): there is no timeline here; torch.profiler shows what "
        f"runs on which thread, also on roundelay-horovod."
    )


def stop_timeline() -> None:
    """Do nothing: there is no timeline to stop."""


def join(device: int = -1) -> int:
    """Bring zeros to what the others all-reduce, until all ranks have joined; return the last."""
    del device
    return session.current("join()").negotiation.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it, whatever else is pending."""
    here = session.current("barrier()")
    here.members(process_set)
    number = process_set.process_set_id or 0
    here.negotiation.wait(here.submit("barrier", None, number, (), lambda _: None))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known to all; every rank calls it with the same ranks."""
    here = session.current("add_process_set()")
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = tuple(made.ranks)
    if not ranks or ranks[-1] >= here.size or len({*ranks}) != len(ranks):
        raise InvalidArgumentError(
            f"A process set of {here.size} ranks has different ones from 0 to {here.size - 1}, "
            f"and at least one, not {list(ranks)}."
        )
    if ranks in here.negotiation.members.values():
        raise InvalidArgumentError(f"There is a process set of ranks {list(ranks)} already.")
    made.process_set_id = _by_all(here, ("add", ranks), lambda _: here.negotiation.add_set(ranks))
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, on every rank; tell whether there was one to forget."""
    here = session.current("remove_process_set()")
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"hvd.remove_process_set takes an hvd.ProcessSet, not {shown(process_set)}."
        )
    number, process_set.process_set_id = process_set.process_set_id, None
    if not number:  # unknown, or that of all ranks, which stays
        process_set.process_set_id = number
        return False
    _by_all(here, ("remove", number), lambda _: here.negotiation.remove_set(number))
    return True


def _by_all(here: session.Session, what: tuple[str, Any], run: Callable[[Any], Any]) -> Any:
    done = here.submit("process_set", None, 0, (what,), run)
    return here.negotiation.wait(done)


def reduction_of(call: str, op: int | None, average: bool | None = None) -> int:  # noqa: FBT001
    """Return the reduction that `op=`, or the older `average=`, asks for."""
    if op is not None and average is not None:
        raise InvalidArgumentError(f"hvd.{call} takes op= or average=, not both.")
    if op is None:
        return Average if average is None or truth("average", average) else Sum
    if type(op) is not int or op not in range(6):
        raise InvalidArgumentError(
            f"hvd.{call} has no reduction {shown(op)}; take hvd.Sum or another."
        )
    return op


def refuse_globals(root: int) -> None:
    """Refuse to broadcast all variables there are: nobody lists them."""
    raise UnsupportedOperationError(
        f"hvd.broadcast_global_variables({root}): there is no list of all variables any more. "
        f"Take callbacks.BroadcastGlobalVariablesCallback, or hvd.broadcast_model(model, {root})."
    )
