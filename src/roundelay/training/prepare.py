"""`rd.prepare`: one call between a model for one device and the same model on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.parallel.mesh import Mesh
from roundelay.training._expert_weights import join_experts
from roundelay.training._join_mesh import (
    Plan,
    check_divided,
    check_mesh,
    check_pipeline,
    described_plan,
    join_mesh,
    meant_mesh,
    refuse_strategy,
)
from roundelay.training._mesh_ranks import MeshRanks
from roundelay.training._run import FIRST_UNPREPARE, Run, refuse_prepared
from roundelay.training._setup import Setup, agree, find_parameters, send_from_first
from roundelay.training._shared_memory import refuse_shared_memory
from roundelay.training._shared_outputs import watch_outputs
from roundelay.training._sparse import refuse_odd
from roundelay.training.materialize import is_later, start_from_first
from roundelay.training.optimizer.joined import JoinedOptimizers
from roundelay.training.optimizer.own_parameters import refuse_own_parameters
from roundelay.training.optimizer.prepared import PreparedOptimizer, take_over
from roundelay.training.precision import Precision, cast_inputs, precision_of
from roundelay.training.scaler import scaler_of
from roundelay.training.strategies import strategies
from roundelay.training.strategy import Strategy
from roundelay.training.sync_batch_norm import join_norms

__all__ = ["known_strategies", "prepare", "strategy_of"]

BUFFERS = ("first", "mean")
Model = TypeVar("Model", bound=torch.nn.Module)


def prepare(
    model: Model,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    comm: Communicator | None = None,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    strategy: str | Strategy = "ddp",
    precision: str | Precision = "fp32",
    buffers: str = "first",
) -> tuple[Model, Any]:  # Any: the optimizer, or several, of its class and with `clip_grad_norm_`
    """Return the model and the optimizer, both the same objects, ready to train on all ranks.

    Several optimizers, a tuple or a list, come back as such; each has some of the parameters.

    `model(x)`, `loss.backward()`, `optimizer.step()` and `zero_grad()` stay as they were. The ranks
    must have built the same model; they start from rank 0's weights. After every step buffers are
    rank 0's, or with `buffers="mean"` the mean over the ranks.

    With a mesh in place of a communicator the strategy acts along the axes dp, cp and ep, where
    ranks see other data. A plan divides layers along tp, with `sequence_parallel` also what lies
    between them. Parameters that are divided already stay so; all others are whole on every rank.
    A pipeline takes the mesh that its stages are an axis of.
    """
    comm, mesh = meant_mesh(model, comm, mesh)
    ranks = mesh.comm if isinstance(mesh, Mesh) else comm
    if not isinstance(ranks, Communicator):
        raise InvalidArgumentError(
            f"prepare needs comm=, the communicator of rd.init() or rd.run, or mesh=, an rd.Mesh "
            f"of its ranks, not {shown(comm if mesh is None else mesh)}."
        )
    number = _prepared[ranks] = _prepared.get(ranks, 0) + 1

    def label(group: Communicator) -> Communicator:
        # Ranks that take one model for another are told in any call.
        return group.labelled(number) if number > 1 else group

    axes = MeshRanks(mesh) if isinstance(mesh, Mesh) else None

    def make() -> tuple[Strategy, Setup]:
        check_mesh(comm, mesh, plan, sequence_parallel=sequence_parallel)
        listed, as_given = _listed(optimizer)
        _check(model, listed)
        check_pipeline(model, mesh)
        check_divided(model, mesh)
        if buffers not in BUFFERS:
            raise UnknownNameError("ways to share buffers", str(buffers), BUFFERS)
        joined = JoinedOptimizers(listed)
        setup = Setup(model, joined, as_given, ranks, precision_of(precision), buffers, mesh=axes)
        setup.plan = described_plan(plan, sequence_parallel=sequence_parallel)
        setup.parameters = find_parameters(model, joined)
        _refuse_inference(model)  # no lazy parameters, which can't be asked
        setup.groups = [list(group["params"]) for group in joined.param_groups]
        chosen = strategy_of(strategy)
        refuse_odd(chosen, setup)
        if axes is not None:
            refuse_strategy(chosen, axes)
        refuse_shared_memory(chosen, setup)
        _refuse_gradients(model)
        refuse_own_parameters(chosen, setup)
        return chosen, setup

    chosen, setup = agree(ranks, make)
    if axes is None:
        setup.comm = label(ranks)
        if ranks.size > 1:
            made = [parameter for parameter in model.parameters() if not is_later(parameter)]
            send_from_first(ranks, [*made, *model.buffers()])
    else:
        axes.connect(label)
        join_mesh(setup, chosen, plan, sequence_parallel=sequence_parallel)
    tensors = (*model.named_parameters(), *model.named_buffers())
    setup.dtypes = {name: one.dtype for name, one in tensors}
    if not chosen.materializes:
        start_from_first(setup.comm, model.parameters())
    setup.scaler = scaler_of(setup.precision)
    hooks = cast_inputs(model, setup.precision)
    run = Run(chosen, setup)
    run.hooks += [*hooks, *watch_outputs(setup)]
    join_norms(run)
    join_experts(run)
    for place, one in enumerate(setup.optimizer.all):
        take_over(one, run, place)
    return model, optimizer


#: How many models were prepared on each communicator: all ranks have the same number for one.
_prepared: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()


def known_strategies() -> dict[str, Strategy]:
    """Return every strategy that has a name, by that name."""
    return {name: kind(**options) for kind in strategies for name, options in kind.names.items()}


def strategy_of(given: Any) -> Strategy:  # Any: a word, an object, or a mistake to be named
    """Return the strategy that a word stands for."""
    if isinstance(given, Strategy):
        return given
    known = known_strategies()
    if not isinstance(given, str):
        raise InvalidArgumentError(
            f"strategy is one of {', '.join(known)} or an object with options, not {given!r}."
        )
    if given not in known:
        raise UnknownNameError("strategies", given, known)
    return known[given]


def _listed(given: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:  # Any: may be a mistake
    """Return one optimizer or several as a list, and what hands out such a list as it was given."""
    if isinstance(given, (list, tuple)):
        return list(given), tuple if isinstance(given, tuple) else list
    return [given], lambda found: found[0]


def _check(model: object, optimizers: Sequence[object]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"prepare needs a torch.nn.Module, not {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgumentError(
                f"prepare can't look into {f'the module {name}' if name else 'the model'}, which "
                f"torch.jit has compiled. Prepare it as it is in Python, with torch.compile."
            )
    if not optimizers:
        raise InvalidArgumentError("prepare needs an optimizer, or several, and got none.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(
                f"prepare needs a torch optimizer, not {type(optimizer).__name__}."
            )
        if isinstance(optimizer, PreparedOptimizer):
            raise InvalidArgumentError(f"This optimizer is prepared already. {FIRST_UNPREPARE}")
    refuse_prepared(model)


def _refuse_inference(model: torch.nn.Module) -> None:
    """Refuse what autograd would refuse in the first pass, far from its cause."""
    cure = "Use torch.no_grad() in its place, or leave the block before."
    if torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            f"prepare was called inside torch.inference_mode(), and what it makes there can't be "
            f"trained. {cure}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        absent = torch.nn.parameter.is_lazy(tensor) or is_later(tensor)
        if not absent and tensor.is_inference():
            raise InvalidArgumentError(
                f"{name} was made inside torch.inference_mode() and can't be trained, nor written "
                f"into. {cure}"
            )


def _refuse_gradients(model: torch.nn.Module) -> None:
    """Refuse gradients of this rank alone, which the next step would take for those of all."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InvalidArgumentError(
                f"The parameter {name} has a gradient at prepare. It is this rank's own, and no "
                f"rank brings it together with those of the others. Call optimizer.zero_grad() "
                f"before prepare, or run backward after it."
            )
