"""Have gradients of what cut layers give all ranks compared between these, as of parameters."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.passes import watch_whole_gradients
from roundelay.training._mesh_ranks import DATA, STAGES
from roundelay.training._module_hooks import ModuleHook
from roundelay.training._setup import Setup

__all__ = ["watch_outputs"]


def watch_outputs(setup: Setup) -> list[Any]:  # Any: torch's handles
    """Have each forward pass of the model note what it puts together; return the hooks for that."""
    ranks = _ranks_of_parts(setup)
    if ranks is None:
        return []
    step = weakref.ref(setup.step)

    def before(*_: Any) -> None:
        alive = step()
        watch_whole_gradients(ranks, None if alive is None else alive.alike)

    before()  # stages of a pipeline are not called as models are
    outside: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
    # Again in each pass: another model may have these ranks, too.
    return [setup.model.register_forward_pre_hook(ModuleHook(outside(before)), prepend=True)]


def _ranks_of_parts(setup: Setup) -> Communicator | None:
    """Return the one axis along which ranks have parts of the same layers.

    Where there are several, what is whole along one is another thing at each place of the others.
    """
    mesh = setup.mesh
    if mesh is None or setup.step.alike is None:
        return None
    axes = mesh.mesh
    names = [name for name in axes.axes if name not in (*DATA, STAGES) and axes.size(name) > 1]
    return axes[names[0]] if len(names) == 1 else None
