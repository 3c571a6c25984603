"""`rd.loader`: a dataset in global batches, each rank's share cut into micro-batches that fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from roundelay.arguments import shown, truth, whole
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.training._mesh_ranks import rows_of
from roundelay.training._run import Run, run_of
from roundelay.training.loader._batches import Drawn, Order, Plan, RowStream
from roundelay.training.loader._options import check_options
from roundelay.training.loader._rows import compare_rows
from roundelay.training.loader.micro_batches import Loader

__all__ = ["Loader", "loader"]

Made = tuple[Plan, dict[str, Any]]


def loader(
    dataset: Any,  # Any: torch's datasets, or whatever has rows by number and a length
    batch_size: int | None = None,
    *,
    comm: Communicator | None = None,
    mesh: Mesh | None = None,
    model: torch.nn.Module | None = None,
    micro_batch: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    sampler: Any = None,  # Any: torch's samplers, or whatever gives indices
    batch_sampler: Any = None,
    drop_last: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Loader:
    """Return this rank's share of the dataset, in micro-batches of a global batch.

    `batch_size` is that of all ranks together: the result of training does not depend on their
    number. Where a batch can't be divided evenly, every row weighs the same nevertheless, if losses
    are means over rows. With `micro_batch` rows at most at a time, a batch takes several backward
    passes; then pass the prepared `model`, and its `optimizer.step()` and `zero_grad()` act only
    after the last. Rows are shuffled, unless they are a stream or there is a sampler, which then
    says the order of all ranks. More options are DataLoader's. Every rank calls it.

    On a mesh, `mesh=` in place of `comm=`, the axes dp and ep divide the rows; ranks that differ
    on others only, such as tp or cp, get the same ones.
    """
    run = None if model is None else run_of("loader", model)
    group, everyone = _ranks(comm, mesh, run)

    draws = batch_sampler if sampler is None else sampler

    def make() -> Made:
        _check_sources(dataset, batch_size, draws, batch_sampler, shuffle, options)
        ordered = draws is not None or isinstance(dataset, IterableDataset)
        shuffles = not ordered and (shuffle is None or truth("loader: shuffle", shuffle))
        check_options(dataset, options, shuffles=shuffles)
        plan = _planned(batch_size, group, micro_batch, run, sized=batch_sampler is None)
        rows = _length(dataset if draws is None else draws)
        leaves = truth("loader: drop_last", drop_last)
        truth("loader: quiet", quiet)
        of = "dataset" if draws is None else "sampler"
        _check_rows(rows, plan.batch_size, drop_last=leaves, of=of)
        state = {
            "batch_size": plan.batch_size, "rows": rows,
            "shuffle": shuffles, "drop_last": leaves,
            "seed": whole("loader: seed", seed, 0, 1 << 62),
        }  # fmt: skip
        return plan, state

    plan, state = _agree(everyone, make, options.get("num_workers", 0))
    if everyone.size > 1 and not isinstance(dataset, IterableDataset):
        compare_rows(everyone, dataset, reads=draws is None and not options.get("num_workers"))
    source: Order | Drawn | RowStream
    if draws is not None:
        source = Drawn(draws, plan.batch_size, everyone)
    elif isinstance(dataset, IterableDataset):
        source = RowStream(dataset, plan, drop_last=state["drop_last"])
    else:
        source = Order(state["rows"], plan.batch_size or 1, shuffle=state["shuffle"])
    if everyone.rank == 0 and not quiet:
        sys.stderr.write(f"roundelay: {plan}{_rest(state)}\n")
    return Loader(dataset, plan, source, run, group, state, **options)


def _ranks(comm: object, mesh: object, run: Run | None) -> tuple[Communicator, Communicator]:
    """Return the ranks that divide rows between them, and all that have some of them."""
    if mesh is not None and (comm is not None or not isinstance(mesh, Mesh)):
        raise InvalidArgumentError(
            f"loader takes comm=, a communicator, or mesh=, an rd.Mesh, not {shown(comm)} and "
            f"{shown(mesh)}."
        )
    if mesh is None and not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"loader needs comm=, the communicator of rd.init() or rd.run, or mesh=, not "
            f"{shown(comm)}."
        )
    if run is not None:
        own = None if run.setup.mesh is None else run.setup.mesh.mesh
        return run.comm if own is None else rows_of(own), run.everyone
    if isinstance(mesh, Mesh):
        return rows_of(mesh), mesh.comm
    return comm, comm  # type: ignore[return-value] # it is one, as asked above


def _check_sources(
    dataset: object,
    batch_size: object,
    draws: object,
    batch_sampler: object,
    shuffle: bool | None,  # noqa: FBT001 - as it was given
    options: dict[str, Any],
) -> None:
    stream = isinstance(dataset, IterableDataset)
    inner = getattr(draws, "sampler", None)
    if not stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        wrong = (
            f"takes a dataset with rows by number and a length, or an IterableDataset, not "
            f"{shown(dataset)}"
        )
    elif not stream and draws is None and _length(dataset) is None:
        wrong = f"takes a dataset with a length, and that of {shown(dataset)} can't be told"
    elif draws is not None and (isinstance(draws, (str, bytes)) or not _iterable(draws)):
        wrong = f"takes a sampler that gives the numbers of rows, not {shown(draws)}"
    elif draws is not None and (stream or shuffle):
        wrong = "takes a sampler only where it says the order: without shuffle, and of no stream"
    elif stream and shuffle:
        wrong = "can't shuffle an IterableDataset, whose rows come as they come: shuffle in it"
    elif batch_sampler is not None and (batch_size is not None or draws is not batch_sampler):
        wrong = (
            "takes a batch_sampler alone: it says the batches, so leave out batch_size and sampler"
        )
    elif isinstance(draws, DistributedSampler) or isinstance(inner, DistributedSampler):
        wrong = (
            "divides rows between the ranks itself, and a DistributedSampler would divide them "
            "twice: pass shuffle=True, or the sampler that you would use on one device"
        )
    elif options.get("in_order") is False:
        wrong = "can't take in_order=False: ranks would have rows of different batches in one step"
    else:
        return
    raise InvalidArgumentError(f"loader {wrong}.")


def _iterable(draws: object) -> bool:
    listed = hasattr(draws, "__getitem__") or isinstance(draws, Iterable)
    return listed and getattr(draws, "ndim", 1) == 1  # of tensors and arrays, those of numbers


def _planned(
    batch_size: object, group: Communicator, micro_batch: object, run: Run | None, *, sized: bool
) -> Plan:
    rows = whole("loader: batch_size", batch_size, 1) if sized else None
    most = None if micro_batch is None else whole("loader: micro_batch", micro_batch, 1)
    plan = Plan(rows, group.rank, group.size, most)
    if most is not None and run is None and (rows is None or plan.parts(rows) > 1):
        raise InvalidArgumentError(
            f"loader: a {plan} needs the model: pass model=, which rd.prepare has returned, so "
            f"that optimizer.step() waits for the last micro-batch."
        )
    return plan


def _length(rows: Any) -> int | None:  # Any: a dataset or a sampler
    try:
        return len(rows)
    except (TypeError, NotImplementedError):
        return None


def _check_rows(rows: int | None, batch_size: int | None, *, drop_last: bool, of: str) -> None:
    if rows == 0:
        raise InvalidArgumentError(f"loader: the {of} has no rows.")
    if drop_last and batch_size is None:
        raise InvalidArgumentError("loader: drop_last is for the batch_sampler to know.")
    if drop_last and rows is not None and rows < (batch_size or 0):
        raise InvalidArgumentError(
            f"loader: the {of} has {rows} rows, fewer than one batch of {batch_size}."
        )


def _agree(comm: Communicator, make: Callable[[], Made], workers: object) -> Made:
    """Make the plan, and see that every rank has the same; raise on all what differs or fails."""
    made: Made | None = None
    problem: InvalidArgumentError | None = None
    try:
        made = make()
        mine = f"micro_batch={made[0].micro_batch}, num_workers={workers}, " + ", ".join(
            f"{name}={value}" for name, value in made[1].items()
        )
    except InvalidArgumentError as error:
        problem, mine = error, str(error)
    every: list[tuple[bool, str]] = comm.all_gather_object((problem is not None, mine))
    if made is None or problem is not None:
        raise problem or InvalidArgumentError("loader needs a dataset.")
    for rank, (failed, theirs) in enumerate(every):
        if failed or theirs != mine:
            raise CollectiveMismatch(
                f"loader needs the same dataset and options on every rank, and divides the rows "
                f"itself; but they differ:\n  rank {comm.rank}: {mine}\n  rank {rank}: {theirs}"
            )
    return made


def _rest(state: dict[str, Any]) -> str:
    rows, batch_size = state["rows"], state["batch_size"]
    left = rows % batch_size if rows and batch_size else 0
    if not left:
        return ""
    if state["drop_last"]:
        return f"; the last {left} of {rows} rows are left out"
    return f"; the last batch has {left}"
