"""`rd.evaluate`: every row once over all ranks, and the numbers that one device would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roundelay.arguments import number, shown
from roundelay.errors import CollectiveMismatch, CommunicationError, InvalidArgumentError
from roundelay.training._run import Run, found_run
from roundelay.training.loader.micro_batches import Loader
from roundelay.training.sync_batch_norm import SyncBatchNorm

__all__ = ["evaluate"]

Totals = dict[str, tuple[Any, float]]  # Any: numpy arrays; and how much they weigh


def evaluate(
    model: torch.nn.Module,
    batches: Loader,
    measure: Callable[[torch.nn.Module, Any], Any],  # Any: a batch; numbers, by name or one alone
    *,
    sums: Collection[str] = (),
) -> Any:  # Any: a number or a tensor, or a dict of them
    """Return what `measure(model, batch)` gives, over all rows of a loader. Every rank calls it.

    It gives numbers by name, or one alone. A tensor with a value for each row, or one number that
    is a mean over the rows of the batch, becomes the mean over all rows; a pair of a total and its
    weight, tokens for example, becomes the sum of totals over the sum of weights. What is named in
    `sums` is added up: counts, for example. The model is in eval mode and without gradients
    meanwhile, and afterwards as it was, whatever happens.
    """
    sums = _names(sums)
    _check(model, batches, measure)
    run = found_run(model)
    mark = None if run is None else run.mark()
    if run is not None:
        run.state.enter("rd.evaluate")
    totals: Totals = {}
    problem: Exception | None = None
    try:
        with _evaluating(model):
            _add_up(model, batches, measure, sums, totals)
    except CommunicationError:
        raise
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        problem = error
    every = _bring_together(batches, run, problem, totals, mark)
    for rank, (failed, theirs, _) in enumerate(every):
        if failed:
            raise CollectiveMismatch(f"evaluate failed on rank {rank}: {failed}")
        if theirs.keys() != totals.keys():
            raise CollectiveMismatch(
                f"evaluate needs the same names on every rank, but rank {batches.comm.rank} "
                f"measures {[*totals]} and rank {rank} {[*theirs]}."
            )
    if run is not None and len({mark for _, _, mark in every}) > 1:
        run.compare()
    counted = _with_other_data(run, every)
    found = {name: _result(name, [one[name] for _, one, _ in counted], sums) for name in totals}
    return found[""] if [*found] == [""] else found


def _with_other_data(run: Run | None, every: list[Any]) -> list[Any]:
    """Return what ranks have found that see other data; on a mesh, some see the same."""
    mesh = None if run is None else run.setup.mesh
    return every if mesh is None or mesh.alone else [every[rank] for rank in mesh.numbers]


def _bring_together(
    batches: Loader, run: Run | None, problem: Exception | None, totals: Totals, mark: Any
) -> list[tuple[str, Totals, Any]]:
    """Return what all ranks have found; where there is a problem, raise it."""
    told = "" if problem is None else f"{type(problem).__name__}: {problem}"
    try:
        if problem is not None and run is not None:
            run.state.leave_evaluation(together=False)
        comm = batches.comm if run is None or run.setup.mesh is None else run.everyone
        every: list[Any] = comm.all_gather_object((told, totals, mark))
        if run is not None and any(failed for failed, _, _ in every):
            run.state.leave_evaluation(together=True)
    except CommunicationError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return every


def _check(model: object, batches: object, measure: object) -> None:
    if not isinstance(model, torch.nn.Module) or not callable(measure):
        raise InvalidArgumentError(
            f"evaluate takes a torch.nn.Module, a loader, and a function of the model and a batch, "
            f"not {shown(model)} and {shown(measure)}."
        )
    if not isinstance(batches, Loader):
        raise InvalidArgumentError(
            f"evaluate goes over what rd.loader returns, not {type(batches).__name__}."
        )
    if batches.leaves_out:
        raise InvalidArgumentError(
            "evaluate is for all rows, and this loader leaves some out: make it without drop_last."
        )


def _names(sums: object) -> list[str]:
    """Return the names in `sums`; a word alone would be taken for its letters."""
    plain = isinstance(sums, (list, tuple, AbstractSet, Mapping))
    found: list[object] = [*sums] if plain else [None]  # type: ignore[misc] # they can be listed
    if not all(isinstance(one, str) for one in found):
        raise InvalidArgumentError(
            f"evaluate: sums= is a list of names, such as sums=('right',), not {shown(sums)}."
        )
    return [str(one) for one in found]


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _add_up(
    model: torch.nn.Module,
    batches: Loader,
    measure: Callable[[torch.nn.Module, Any], Any],
    sums: Collection[str],
    totals: Totals,
) -> None:
    # A rank without rows calls the model as the others do, on a row that does not count; but not
    # where this row would be part of the others' statistics.
    mixing = any(isinstance(module, SyncBatchNorm) and module.running_mean is None
                 for module in model.modules())  # fmt: skip
    for batch in batches.loop(filled=not mixing):
        found = measure(model, batch)
        named = found if isinstance(found, Mapping) else {"": found}
        _check_names(named, sums)
        for name, value in named.items():
            total, weight = _counted(name, value, batches.rows, name in sums)
            if not batches.rows:
                total, weight = np.zeros_like(total), 0.0
            before, weighed = totals.get(name, (np.zeros_like(total), 0.0))
            totals[name] = before + total, weighed + weight


def _check_names(named: Mapping[Any, Any], sums: Collection[str]) -> None:  # Any: the user's
    for name in named:
        if not isinstance(name, str):
            raise InvalidArgumentError(
                f"evaluate: numbers are given by name, and {shown(name)} is no string."
            )
    for name in sums:
        if name not in named or not name:
            given = ", ".join(map(repr, named)) if [*named] != [""] else "one number without a name"
            raise InvalidArgumentError(
                f"evaluate: sums= names {name!r}, and what is measured is {given}."
            )


def _counted(name: str, value: Any, rows: int, summed: bool) -> tuple[Any, float]:  # noqa: FBT001
    """Return the total of one batch, in float64 or as a whole number, and how much it weighs."""
    what = f"evaluate: {name!r}" if name else "evaluate: what is measured"
    if isinstance(value, tuple) and not summed:
        if len(value) != 2:  # noqa: PLR2004 - a pair
            raise InvalidArgumentError(
                f"{what} takes a pair, a total and its weight, not a tuple of {len(value)}. Give "
                f"several numbers by name, in a dict."
            )
        total, weight = _number(what, value[0]), number(f"{what}: its weight", value[1])
        if not 0 <= weight < math.inf:
            raise InvalidArgumentError(f"{what}: its weight is a number from 0, not {weight}.")
        return total, weight
    found = _number(what, value)
    if summed:
        return found, 1.0
    if found.ndim:
        if rows and len(found) != rows:
            raise InvalidArgumentError(
                f"{what} has {len(found)} values for {rows} rows. Give one for each row, a mean "
                f"over them, a pair (total, weight), or name it in sums=."
            )
        return found.sum(0), float(rows)
    if found.dtype.kind != "f":
        way = "name it in sums=" if name else "give it by name, {'count': …}, with sums=['count']"
        raise InvalidArgumentError(
            f"{what} is the whole number {found}, which is no mean: {way}, or give one value for "
            f"each row."
        )
    return found * rows, float(rows)


def _number(what: str, value: Any) -> Any:
    plain = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if isinstance(plain, torch.Tensor):
        plain = plain.double() if plain.is_floating_point() else plain.long()
    try:
        array = np.asarray(plain)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise InvalidArgumentError(f"{what} is a {type(value).__name__} and no number.")
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _result(name: str, every: list[tuple[Any, float]], sums: Collection[str]) -> Any:
    total = sum(one for one, _ in every)
    if name not in sums:
        weight = sum(one for _, one in every)
        if weight == 0:
            raise InvalidArgumentError(f"evaluate: the weights of {name!r} add up to 0: no mean.")
        total = total / weight
    return torch.from_numpy(total) if np.ndim(total) else total.item()
