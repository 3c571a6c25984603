"""Workers push gradients to servers, which aggregate or apply them, and pull what comes of it.

The synchronous round waits for all workers and gives what one device would give. Asynchronous
servers apply every gradient as it comes; with a bound, no worker gets too far ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roundelay.arguments import index_of, indices_of, shown, truth, whole
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.training._setup import Setup
from roundelay.training.strategies.parameter_server._roles import LOST_WORKERS, build_roles
from roundelay.training.strategies.parameter_server.aggregate import OwnAggregate
from roundelay.training.strategy import Strategy, StrategyState

__all__ = ["ParameterServer"]

MODES = ("async", "ssp", "sync")
UPDATES = ("server", "worker")
AGGREGATES = ("mean", "sum")
STALENESS = 2  # steps, where ssp is asked for and nothing is said


@dataclass(frozen=True, slots=True)
class ParameterServer(Strategy):
    """Parameter server: one rank or several gather gradients from workers and serve the result.

    `mode="ssp"` lets a worker be at most `staleness` steps ahead of the slowest. `servers` is how
    many there are, the first ranks, or which; with `dedicated=True` they do nothing else, and
    are the last ranks. `aggregate` may be a function of the list of all workers' gradients of one
    parameter, in rank order.

    In the asynchronous modes the job goes on without workers that are lost, and fails when all
    others have ended; with `lost_workers="allow"` it does not fail.
    """

    names: ClassVar[dict[str, dict[str, Any]]] = {
        "ps": {},
        "ps-async": {"mode": "async"},
        "ps-ssp": {"mode": "ssp"},
    }

    mode: str = "sync"
    staleness: int | None = None  # None: 2 for ssp, which alone has a bound
    servers: int | Sequence[int] = 1
    dedicated: bool = False
    update: str | None = None  # who steps the optimizer; None: workers if sync, else servers
    aggregate: str | OwnAggregate = "mean"
    check_finite: bool = True
    lost_workers: str = "fail"  # what the loss of workers is to a job that goes on without them

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("update", "server" if self.update is None else self.update, UPDATES),
            ("aggregate", "mean" if callable(self.aggregate) else self.aggregate, AGGREGATES),
            ("lost_workers", self.lost_workers, tuple(LOST_WORKERS)),
        ):
            if str(value) not in known:
                raise UnknownNameError(f"{name} of ParameterServer", str(value), known)
        for name in ("dedicated", "check_finite"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        if self.mode != "sync" and self.update == "worker":
            raise InvalidArgumentError(
                f"mode={self.mode!r} applies gradients as they come, which only the server can: "
                f"update='worker' goes with mode='sync'."
            )
        if self.mode == "sync" and self.lost_workers != "fail":
            raise InvalidArgumentError(
                f"lost_workers={self.lost_workers!r} is for mode='async' and mode='ssp': in sync "
                f"every step waits for all workers, and ends with the first that is lost."
            )
        if self.staleness is not None and self.mode != "ssp":
            raise InvalidArgumentError(
                f"staleness={self.staleness!r} is for mode='ssp'; mode={self.mode!r} has no bound."
            )
        if self.staleness is not None:
            steps = whole("staleness of ParameterServer", self.staleness, 0)
            object.__setattr__(self, "staleness", steps)

    @property
    def synchronous(self) -> bool:  # type: ignore[override] # an attribute of other strategies
        """Whether every step gives what one device would give on the whole batch."""
        return self.mode == "sync" and self.aggregate == "mean"

    @property
    def bound(self) -> int | None:
        """How many steps a worker may be ahead of the slowest; None where that is not limited."""
        if self.mode != "ssp":
            return None
        return STALENESS if self.staleness is None else self.staleness

    @property
    def server_updates(self) -> bool:
        """Whether servers step the optimizer."""
        return self.update == "server" or self.mode != "sync"

    steps_elsewhere = server_updates

    def places(self, size: int) -> tuple[list[int], list[int]]:
        """Return the ranks that serve and those that train."""
        every = list(range(size))
        count, servers = index_of(self.servers), indices_of(self.servers) or []
        if count is not None and 1 <= count <= size:
            servers = every[size - count :] if self.dedicated else every[:count]
        good = bool(servers) and len({*servers} & {*every}) == len(servers)
        workers = [rank for rank in every if not self.dedicated or rank not in servers]
        if not good or not workers:
            left = " and leave a worker" if self.dedicated else ""
            raise InvalidArgumentError(
                f"servers= is a number or a list of different ranks; with {size} ranks it can't "
                f"be {shown(self.servers)}: there must be a server{left}."
            )
        return servers, workers

    def share(self, setup: Setup) -> StrategyState:
        """Start the servers of this rank; on a rank that only serves, serve and never return."""
        return build_roles(self, setup)
