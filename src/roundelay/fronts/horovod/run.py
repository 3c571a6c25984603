"""`horovod.run`: a function on new ranks of this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import session
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.launch import run as rd_run

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on `np` new ranks of this host, where `hvd.init` finds them.

    Returns what each gave, pickled on its way, in the order of ranks.
    """
    if hosts is not None:
        raise UnsupportedOperationError(
            f"horovod.run(hosts={hosts!r}): this starts ranks here only. For several hosts there "
            f"is `roundelay run`, on each of them."
        )
    if options:
        raise InvalidArgumentError(
            f"horovod.run does not take {', '.join(options)}: ranks start by themselves here, and "
            f"need neither MPI nor ssh."
        )

    def body(comm: Communicator) -> Any:
        session.adopt(comm)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            session.end()
            session.adopt(None)

    return rd_run(body, ranks=np, allow_pickle=True)
