"""`rd.ray.run`: a function on ranks that are actors of Ray, on one node or on many."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roundelay.arguments import FOREVER_S, number, shown, whole
from roundelay.errors import (
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
    RankFailed,
    RendezvousError,
    RoundelayError,
    UnsendableError,
    rank_count,
    ranks_text,
)
from roundelay.fronts.ray.store import forget, join, wait_limit
from roundelay.launch.local import MOST_RANKS, check_timeout, check_work
from roundelay.launch.script import be_rank
from roundelay.processes.reports import told_by_user

__all__ = ["run"]

GRACE_S = 5.0  # for the others, once one rank has failed, to say how they fared
EXIT = "Worker exit detail: "  # after this, Ray says how a process ended
#: In what Ray says of an object that it can't pickle: why, and by which variables it reaches it.
WHY, NAMES = re.compile(r"FAIL serialization: (.+)"), re.compile(r"FailTuple\((\w+) \[")


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: Iterable[Any] = (),
    *,
    timeout: float | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    runtime_env: Mapping[str, Any] | None = None,
    wait: float | None = None,
) -> list[Any]:
    """Call `fn(comm, *args)` on ranks that Ray starts, and return what each gave, in rank order.

    Ranks of one node share memory, and nodes are joined by Gloo. Each rank is an actor with
    `num_cpus` and `num_gpus`, in `runtime_env`. Function, arguments and results go by Ray's own
    pickle, so arrays come back read-only. When a rank fails the others are ended, and `RankFailed`
    is raised here. `timeout` is how long any call may wait for another rank.

    More than the cluster has is refused at once, and what others use is waited for up to 60 s;
    with `wait` both get so many seconds, which is for clusters that grow. Where Ray is not
    initialised it starts, as with any first call of Ray.
    """
    check_work(fn, args)
    ranks = whole("ranks", ranks, 1, MOST_RANKS)
    limit, patience = wait_limit(timeout), min(check_timeout("wait", wait), FOREVER_S)
    each = {"CPU": _share("num_cpus", num_cpus), "GPU": _share("num_gpus", num_gpus)}
    if not isinstance(runtime_env, Mapping | None):
        raise InvalidArgumentError(
            f"runtime_env of rd.ray.run is a dict, as Ray takes it, not {shown(runtime_env)}: "
            f"runtime_env={{'env_vars': {{'NAME': 'value'}}}}."
        )
    if not ray.is_initialized():
        ray.init()
    if wait is None:
        _refuse_too_many(ranks, each, ray.cluster_resources())
    work = [_put("the function", fn), _put("the arguments", tuple(args))]
    token = secrets.token_hex(16)
    with _actors(ranks, each, patience, dict(runtime_env or {})) as actors:
        try:
            calls = [
                actor.work.remote(token, rank, ranks, work, limit)
                for rank, actor in enumerate(actors)
            ]
            return _collect(calls)
        finally:
            forget(token)


class RayRank:
    """One rank: an actor that does one piece of work."""

    def node(self) -> str:
        """Say where it is, once it is there."""
        return str(ray.get_runtime_context().get_node_id())

    def work(
        self, token: str, rank: int, size: int, work: Sequence[Any], timeout: float
    ) -> tuple[Any, ...]:
        """Return the result, behind nothing; or of a failure whether another rank's came first.

        That and its kind, message and traceback are words, since not every exception is one that
        another process can read.
        """
        try:
            fn, args = ray.get(work)
            result = None
            with be_rank(partial(join, token, rank, size, timeout=timeout), fn) as comm:
                result = fn(comm, *args)  # None of a server that is no longer needed
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            kind, trace = type(error).__name__, told_by_user(error)
            told = isinstance(error, PeerLost) or type(error) is CommunicationError  # by another
            return told, kind, str(error), trace
        return (result,)


def _share(what: str, value: float) -> float:
    share = number(what, value)
    if not 0 <= share < float("inf"):
        raise InvalidArgumentError(f"{what} of a rank is a number from 0, not {shown(value)}.")
    return share


def _refuse_too_many(ranks: int, each: Mapping[str, float], cluster: Mapping[str, float]) -> None:
    """Refuse what the cluster does not have as a whole, for which Ray would wait for ever."""
    for name, share in each.items():
        need, there = ranks * share, cluster.get(name, 0.0)
        if need > there:
            option = f"num_{name.lower()}s"
            fits = f"ranks={int(there / share)}" if there >= share else f"less {option} for each"
            fits += f", or {option}={there / ranks:.3g} to have them share" if there else ""
            raise InvalidArgumentError(
                f"rd.ray.run with {rank_count(ranks)} of {option}={share:g} needs {need:g} {name}s,"
                f" but this cluster has {there:g}, so Ray would wait for ever. Take {fits}; "
                f"or start Ray with more, ray.init({option}={need:g}). If the cluster grows by "
                f"itself, say how long to wait for it: wait=600."
            )


def _put(what: str, thing: object) -> Any:
    """Return a reference to a part of the work, which every rank fetches."""
    try:
        return ray.put(thing)
    except Exception as error:  # noqa: BLE001 - whatever an object's own pickling raises
        names = [name for name in NAMES.findall(str(error)) if name != "unknown"]
        if isinstance(thing, tuple):  # of whose items Ray knows no names
            names = [f"args[{at}]" for at, one in enumerate(thing) if not _can_travel(one)]
        raise UnsendableError(
            f"rd.ray.run can't send {what}{_of(names)} to other processes: {_why(error)}. Make "
            f"what can't be pickled, such as locks, files and connections, inside the function."
        ) from None


def _can_travel(thing: object) -> bool:
    try:
        ray.cloudpickle.dumps(thing)
    except Exception:  # noqa: BLE001 - likewise
        return False
    return True


def _of(names: list[str]) -> str:
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _why(error: BaseException) -> str:
    found = WHY.search(str(error))
    return found[1] if found else _line(error)


@contextlib.contextmanager
def _actors(
    ranks: int, each: Mapping[str, float], patience: float, runtime_env: dict[str, Any]
) -> Iterator[list[Any]]:
    """Have Ray start the ranks, those of one node one after another; they end with the block."""
    deadline, bundle = time.monotonic() + patience, {key: n for key, n in each.items() if n}
    options: dict[str, Any] = {"num_cpus": each["CPU"], "num_gpus": each["GPU"]}
    group = None
    actors: list[Any] = []
    try:
        if bundle:  # all of them or none: two jobs that each have half would wait for ever
            group = placement_group([bundle] * ranks, strategy="PACK")
            if not group.wait(patience):
                raise _no_room(ranks, bundle, patience)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        try:
            kind = ray.remote(RayRank).options(runtime_env=runtime_env, **options)
            actors += [kind.remote() for _ in range(ranks)]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"Ray refuses runtime_env={shown(runtime_env)} of rd.ray.run: {_line(error)}"
            ) from None
        yield _by_node(actors, deadline, patience)
    finally:
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)


def _by_node(actors: list[Any], deadline: float, patience: float) -> list[Any]:
    """Return the actors once they are there; those of one node stand together."""
    calls = [actor.node.remote() for actor in actors]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=max(0.0, deadline - time.monotonic()))
    if late:
        missing = ranks_text([calls.index(call) for call in late])
        raise RendezvousError(
            f"Ray has not started {missing} of {len(actors)} within {patience:g} s. See the logs "
            f"of Ray's workers, or allow more time with wait."
        )
    try:
        nodes = ray.get(calls)
    except ray.exceptions.RayError as error:
        raise RendezvousError(f"Ray could not start a rank: {_line(error)}") from error
    return [actors[rank] for rank in sorted(range(len(nodes)), key=lambda n: nodes.index(nodes[n]))]


def _no_room(ranks: int, bundle: Mapping[str, float], patience: float) -> RendezvousError:
    free = ray.available_resources()
    left = ", ".join(f"{free.get(name, 0.0):g} {name}s" for name in bundle)
    needs = " and ".join(f"{share:g} {name}" for name, share in bundle.items())
    return RendezvousError(
        f"Ray has found no room for {rank_count(ranks)} of {needs} each within {patience:g} s: "
        f"{left} are free, and a rank must fit on one node. End what uses them, take fewer ranks "
        f"or less for each, or allow more time with wait."
    )


def _collect(calls: list[Any]) -> list[Any]:
    """Return the results in rank order, or raise the failure that came first.

    Once a rank has failed, the others get a few seconds to say whether they failed because of it.
    """
    results: dict[int, Any] = {}
    failures: list[tuple[bool, RoundelayError]] = []
    pending, deadline = {call: rank for rank, call in enumerate(calls)}, FOREVER_S
    while pending:
        left = deadline - time.monotonic() if failures else FOREVER_S
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, left))
        for call in done:
            rank = pending.pop(call)
            try:
                result = ray.get(call)
            except ray.exceptions.RayTaskError as error:  # the result is none that can travel
                failures.append((False, _unsent(rank, error.cause)))
                continue
            except ray.exceptions.RayError as error:
                failures.append((False, RankFailed(rank, ended=_ended(error))))
                continue
            if len(result) == 1:
                results[rank] = result[0]
            else:
                consequence, kind, message, trace = result
                failed = RankFailed(rank, kind, message, traceback=trace)
                failures.append((consequence, failed))
        if failures and deadline == FOREVER_S:
            deadline = time.monotonic() + GRACE_S
        if not done:
            break
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    return [results[rank] for rank in range(len(calls))]


def _unsent(rank: int, cause: BaseException) -> UnsendableError:
    """Say why what a rank returned did not come here."""
    return UnsendableError(
        f"rd.ray.run can't bring back what rank {rank} returned: {_why(cause)}. Return what can be "
        f"pickled: numbers, arrays, text, and lists and dicts of these."
    )


def _ended(error: BaseException) -> str:
    """Say how a process ended that could not say so itself."""
    text = _line(error)
    return f"died with no Python error. Ray says: {text.partition(EXIT)[2] or text}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
