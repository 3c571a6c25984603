"""Options of a loader that are torch's: each is honoured, or refused by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from roundelay.arguments import index_of, shown, truth, whole
from roundelay.errors import InvalidArgumentError, UnknownNameError

MOST_WORKERS = 1024
SAME = ("batch_size", "rows", "shuffle", "drop_last")  # what a loader's state must be of
#: What `rd.loader` has arguments of its own for.
OWN = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
KNOWN = sorted({*inspect.signature(DataLoader.__init__).parameters} - OWN)


def check_options(dataset: Any, options: dict[str, Any], *, shuffles: bool) -> None:
    """Refuse what a DataLoader does not take, or what would be taken and not heeded."""
    for name, value in options.items():
        if name not in KNOWN:
            raise UnknownNameError("options of loader", name, KNOWN)
        if name in ("collate_fn", "worker_init_fn") and not (value is None or callable(value)):
            raise InvalidArgumentError(f"loader: {name} is a function, not {shown(value)}.")
        if name in ("pin_memory", "persistent_workers", "in_order"):
            options[name] = truth(f"loader: {name}", value)
    workers = whole("loader: num_workers", options.get("num_workers", 0), 0, MOST_WORKERS)
    generator = options.get("generator")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidArgumentError(
            f"loader: generator is a torch.Generator, not {shown(generator)}."
        )
    if generator is not None and shuffles:
        raise InvalidArgumentError(
            "loader: rows are shuffled alike on all ranks by seed=, so that a generator would not "
            "be heeded. Write seed=…, or sampler=RandomSampler(dataset, generator=generator)."
        )
    try:
        made: Any = DataLoader(dataset, **{**options, "num_workers": min(workers, 1)})
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InvalidArgumentError(f"loader: torch's DataLoader says: {error}") from None
    if made.timeout and not workers:
        raise InvalidArgumentError(
            f"loader: timeout={shown(made.timeout)} is for worker processes; this loader has none."
        )


def checked_state(state: object, own: dict[str, Any]) -> int:
    """Refuse what is no state of such a loader; return its seed."""
    if not isinstance(state, Mapping) or not state.keys() >= {*own, "epoch", "done", "mark"}:
        raise InvalidArgumentError(f"loader: {shown(state)} is no state of a loader.")
    if state["mark"] is not None and index_of(state["mark"]) is None:
        raise InvalidArgumentError(f"loader: {shown(state)} is no state of a loader.")
    for name in SAME:
        if isinstance(state[name], torch.Tensor) or state[name] != own[name]:
            raise InvalidArgumentError(
                f"loader: the state is of {name}={shown(state[name])}, and this loader has "
                f"{own[name]}, so that its batches are others."
            )
    return whole("loader: seed of the state", state["seed"], 0, 1 << 62)
