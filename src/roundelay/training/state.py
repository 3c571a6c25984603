"""The whole state of a model by its own names, whatever the strategy made of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from roundelay.training import _mesh_state
from roundelay.training._run import Run, run_of

__all__ = ["full_state_dict", "whole_tensors"]


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what `state_dict()` of the same model on one device would be. Every rank calls it."""
    run = run_of("full_state_dict", model)
    run.state.enter("rd.full_state_dict")
    run.take_edits()
    state = _mesh_state.whole_state_dict(run.state)
    run.compare_all()
    return state


def whole_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same, one by one, for models that no rank can hold whole.

    Every rank goes through all of it. Under zero3 one unit is gathered at a time, and a tensor is
    good only until the next one is asked for.
    """
    run = run_of("whole_tensors", model)
    run.state.enter("rd.whole_tensors")
    run.take_edits()
    return _and_compared(run)


def _and_compared(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _mesh_state.whole_tensors(run.state)
    run.compare_all()
