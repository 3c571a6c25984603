"""`rd.unprepare`: a model that was trained on many ranks is one for one device again."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from roundelay.training._run import refuse_divided, run_of
from roundelay.training.optimizer.prepared import give_back
from roundelay.training.shards.sharded_parameter import unshard_parameter

__all__ = ["unprepare"]

Model = TypeVar("Model", bound=torch.nn.Module)


def unprepare(model: Model) -> tuple[Model, Any]:  # Any: the optimizer, or several, of its class
    """Return a prepared model and its optimizer as they were before: plain, whole, on every rank.

    Every rank calls it. Weights and the optimizer's state are those that training has come to, in
    the dtypes that the model came with; gradients are gone. Both may be prepared again, otherwise:
    other layers frozen, another strategy, another precision.
    """
    run = run_of("unprepare", model)
    run.step.check_shut("unprepare")
    setup = run.setup
    refuse_divided(run, "unprepare")
    optimizers: list[Any] = setup.optimizer.all
    run.state.enter("rd.unprepare")
    states = [optimizer.state_dict() for optimizer in optimizers]
    run.take_edits()
    weights = {name: one.clone() for name, one in run.state.full_state_dict().items()}
    run.compare()
    run.grad_hooks.check_stepped("rd.unprepare")  # on all ranks, which are in one step
    run.grad_hooks.forget()
    run.close()
    for optimizer in optimizers:
        give_back(optimizer)
    kinds = {id(parameter.tensor): setup.dtypes[parameter.name] for parameter in setup.parameters}
    with torch.no_grad():
        for name, one in model.named_parameters():
            kind = kinds.get(id(one), setup.dtypes.get(name, one.dtype))
            unshard_parameter(one, weights[name].to(one.device, kind))
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(setup.dtypes.get(name, buffer.dtype))
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return model, setup.as_given(optimizers)
