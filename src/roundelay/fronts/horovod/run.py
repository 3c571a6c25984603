"""`horovod.run`: a function on new ranks of this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import session
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.launch import run as rd_run
from roundelay.launch.host_list import all_here, read_hosts, slots

__all__ = ["run"]

#: How Horovod finds other hosts and connects to them: there are none here, so nothing changes.
WAYS_TO_OTHERS = {
    "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "verbose", "use_gloo",
    "use_mpi", "mpi_args", "network_interface", "network_interfaces",
}  # fmt: skip
#: What is not done here: refused where it is asked for, as `hvd.elastic` is.
NOT_HERE = {
    "min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range",
    "hostfile", "host_discovery_script", "output_filename", "executable",
}  # fmt: skip


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on `num_proc` new ranks of this host, where `hvd.init` finds them.

    Returns what each gave, pickled on its way, in the order of ranks. `np` is the older name.
    """
    if not callable(func):
        raise InvalidArgumentError(f"horovod.run needs a function to call, not {shown(func)}.")
    ranks = num_proc if np is None else np
    _check(ranks, hosts, options)

    def body(comm: Communicator) -> Any:
        session.adopt(comm)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            session.end()
            session.adopt(None)

    return rd_run(body, ranks=ranks, allow_pickle=True)


def _check(ranks: int, hosts: str | None, options: Mapping[str, Any]) -> None:
    if unknown := sorted(options.keys() - WAYS_TO_OTHERS - NOT_HERE):
        raise InvalidArgumentError(f"horovod.run has no {', '.join(unknown)}, here or in Horovod.")
    for name in sorted(options.keys() & NOT_HERE):
        if options[name] is not None:
            raise UnsupportedOperationError(
                f"horovod.run({name}={options[name]!r}): this starts a fixed number of ranks, on "
                f"this host, with this Python. Leave it out; for more there is `roundelay run`."
            )
    if hosts is None:
        return
    if not isinstance(hosts, str):
        raise InvalidArgumentError(f"horovod.run(hosts={hosts!r}): write 'localhost:{ranks}'.")
    named = read_hosts(hosts)
    if not all_here(named):
        raise UnsupportedOperationError(
            f"horovod.run(hosts={hosts!r}): this starts ranks here only. For several hosts there "
            f"is `roundelay run`, on each of them."
        )
    if all(host.slots for host in named) and ranks > slots(named):
        raise InvalidArgumentError(
            f"horovod.run(hosts={hosts!r}): {ranks} ranks are asked for, and this says "
            f"{slots(named)}. Write hosts='localhost:{ranks}', or leave it out."
        )
