"""What `prepare` does with a mesh: one set of weights, divided by a plan, and what can't be."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from roundelay.arguments import shown, truth
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import Sharding, sharding_of
from roundelay.parallel.staging import staging_of
from roundelay.training._mesh_ranks import DATA, EXPERTS, STAGES, MeshRanks, along, together_on
from roundelay.training._module_hooks import ModuleHook
from roundelay.training._setup import Setup, find_parameters, send_from_first
from roundelay.training._shared_gradients import SharedGradients
from roundelay.training._step import StepState
from roundelay.training.materialize import is_later, start_from_first
from roundelay.training.shards.groups import ELEMENTWISE
from roundelay.training.shards.operands import digest, tensors_in
from roundelay.training.strategy import Strategy

#: How layers are divided, by patterns of their names; or the name of a plan that ships.
Plan = Mapping[str, Any] | str  # Any: see the plan
AXES = (*DATA, "tp", STAGES)


def check_mesh(comm: object, mesh: object, plan: object, *, sequence_parallel: object) -> None:
    """Refuse a mesh beside a communicator, and what needs a mesh without one."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InvalidArgumentError(f"mesh of prepare is an rd.Mesh, not {shown(mesh)}.")
    if mesh is not None and comm is not None:
        raise InvalidArgumentError(
            "prepare takes comm= or mesh=, not both: a mesh has its communicator. Leave out comm=."
        )
    if isinstance(mesh, Mesh):
        _check_axes(mesh)
    asked = truth("sequence_parallel", sequence_parallel)
    if plan is None and not asked:
        return
    what = "a plan" if plan is not None else "sequence_parallel=True"
    if not isinstance(mesh, Mesh) or "tp" not in mesh:
        have = "no mesh" if mesh is None else f"{mesh!r}"
        raise InvalidArgumentError(
            f"{what} divides layers along the axis tp of a mesh, and prepare got {have}. Make "
            f"mesh=rd.Mesh(dp=…, tp=…, comm=comm), or leave it out."
        )
    if plan is None:
        raise InvalidArgumentError(
            "sequence_parallel=True is for the layers that a plan divides. Give plan=, too."
        )


def _check_axes(mesh: Mesh) -> None:
    """Refuse axes of which nobody knows whether ranks along them have other data."""
    for name in mesh.axes:
        if name not in AXES:
            raise InvalidArgumentError(
                f"prepare got {mesh!r}, and does not know what its axis {name} divides. It knows "
                f"{', '.join(AXES)}: rows go along dp, for example."
            )


def meant_mesh(
    model: object, comm: Communicator | None, mesh: Mesh | None
) -> tuple[Communicator | None, Mesh | None]:
    """Return what is given; or the mesh of a divided model, where its axes of data are given."""
    if mesh is None and isinstance(comm, Communicator) and isinstance(model, torch.nn.Module):
        found, parts = Mesh.of(comm), _divides(model)
        ours = found and parts and all(Mesh.of(part) is found for part in parts.values())
        if found and ours and comm is along(found, DATA):
            return None, found
    return comm, mesh


def _divides(model: torch.nn.Module) -> dict[str, Communicator]:
    """Return the ranks that have parts of a model between them, by what is divided."""
    staging = staging_of(model)
    found = {} if staging is None else {"its stages": staging.comm}
    for name, parameter in model.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is not None and sharding.comm.size > 1:
            found[name] = sharding.comm
    return found


def check_divided(model: torch.nn.Module, mesh: object) -> None:
    """Refuse a model of which ranks have parts, without the mesh that says which ranks do."""
    for name, sharding in ((one, sharding_of(each)) for one, each in model.named_parameters()):
        if mesh is None and sharding is not None and sharding.comm.size > 1:
            raise InvalidArgumentError(
                f"The parameter {name} is divided along {sharding.axis} between "
                f"{sharding.comm.size} ranks, and prepare got comm=, by which all ranks have the "
                f"same. It needs the mesh: mesh = rd.Mesh(dp=…, {sharding.axis}="
                f"{sharding.comm.size}, comm=comm), divide the model along mesh"
                f"[{sharding.axis!r}], and rd.prepare(…, mesh=mesh)."
            )


def check_pipeline(model: torch.nn.Module, mesh: object) -> None:
    """Refuse a pipeline without the mesh that its stages are an axis of."""
    staging = staging_of(model)
    if staging is None:
        return
    have = "comm=" if mesh is None else repr(mesh)
    place = mesh.place.get(STAGES) if isinstance(mesh, Mesh) else None
    size = mesh.size(STAGES) if isinstance(mesh, Mesh) else 1
    if (place, size) != (staging.comm.rank, staging.comm.size):
        raise InvalidArgumentError(
            f"This pipeline has stages on {staging.comm.size} ranks, and prepare got {have}. Its "
            f"norms, skipped steps and checkpoints are of all stages, so prepare needs the mesh of "
            f"all ranks: mesh = rd.Mesh(dp=…, pp={staging.comm.size}, comm=comm), "
            f"rd.Pipeline(…, comm=mesh['pp']), rd.prepare(…, mesh=mesh)."
        )


def described_plan(plan: Plan | None, *, sequence_parallel: bool) -> str:
    """Return a plan in words that ranks compare.

    >>> described_plan({"*.up": "column"}, sequence_parallel=False)
    "plan {'*.up': 'column'}"
    """
    if plan is None:
        return ""
    told = repr(dict(plan)) if isinstance(plan, Mapping) else repr(plan)
    return f"plan {told}" + (", sequence parallel" if sequence_parallel else "")


def refuse_strategy(strategy: Strategy, mesh: MeshRanks) -> None:
    """Refuse a strategy that can't take the axes of a mesh."""
    if mesh.alone:
        return
    name = type(strategy).__name__
    if not strategy.synchronous:
        raise InvalidArgumentError(
            f"{name} lets ranks take steps of their own, and the ranks of {mesh.mesh!r} that have "
            f"parts of one model take every step together. Use a synchronous strategy, 'ps', "
            f"'ddp' or 'zero2' for example, or a mesh of dp alone."
        )
    if getattr(strategy, "dedicated", False):
        raise InvalidArgumentError(
            f"{name}(dedicated=True) has ranks that only serve, and in {mesh.mesh!r} these would "
            f"be missing in tp, pp and the like. Leave out dedicated=, or use a mesh of dp alone."
        )


def join_mesh(
    setup: Setup, strategy: Strategy, plan: Plan | None, *, sequence_parallel: bool
) -> None:
    """Give all ranks rank 0's weights, divide them by the plan, and know who has what."""
    mesh, model = setup.mesh, setup.model
    if mesh is None:
        return
    setup.comm = mesh.data
    _same_weights(mesh, model)

    if plan is not None:  # which sees by itself that all ranks can take it
        apply = importlib.import_module("roundelay.parallel.tensor.plan").apply_plan
        apply(model, plan, mesh.mesh, sequence_parallel=sequence_parallel)
        _cut_state(setup)

    def check() -> None:
        for name, parameter in model.named_parameters():
            _check_sharding(name, sharding_of(parameter), mesh)

    together_on(mesh.everyone, "prepare", check)
    setup.parameters = find_parameters(model, setup.optimizer)
    mesh.learn(model)
    setup.experts = frozenset(
        at for at, one in enumerate(setup.parameters) if mesh.axis_of(one.name) == EXPERTS
    )
    setup.step.experts = frozenset(setup.parameters[at].name for at in setup.experts)
    together_on(mesh.everyone, "prepare", lambda: _refuse(setup, strategy, mesh))
    if mesh.with_same_modules.size > 1:
        setup.step.beside, setup.step.numbers = mesh.with_same_modules, mesh.numbers
        setup.step.divided = frozenset(mesh.shardings)
        names = [one.name for one in setup.parameters]
        setup.step.alike = SharedGradients(names, setup.step.divided)
        _compare_first(model, setup.step)


def _compare_first(model: torch.nn.Module, step: StepState) -> None:
    """Have ranks with parts of one model compare what it is given, the first time."""

    def before(_: torch.nn.Module, args: Any, options: Any) -> None:
        if torch.is_grad_enabled():
            hook.remove()
            told = [digest(one) for one in tensors_in((args, options)) if not one.is_meta]
            step.given = zlib.crc32(repr(told).encode())

    outside: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
    # First: a plan may divide what comes in.
    hook = model.register_forward_pre_hook(
        ModuleHook(outside(before)), with_kwargs=True, prepend=True
    )


def _cut_state(setup: Setup) -> None:
    """Keep this rank's part of what optimizers have of parameters that were whole until now."""
    for optimizer in setup.optimizer.all:
        for parameter, state in optimizer.state.items():
            sharding = sharding_of(parameter)
            if sharding is None:
                continue
            whole = sharding.whole_shape(parameter.shape)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == whole:
                    state[key] = sharding.local(value)


def _same_weights(mesh: MeshRanks, model: torch.nn.Module) -> None:
    """Have all ranks begin with the first one's weights; of what is divided, each its part."""
    listed = list(model.parameters())
    whole = mesh.same_part(None)
    start_from_first(whole, [one for one in listed if is_later(one)])
    kinds: dict[str | None, tuple[Communicator, list[torch.Tensor]]] = {None: (whole, [])}
    for parameter in listed:
        sharding = sharding_of(parameter)
        axis = None if sharding is None else sharding.axis
        group = kinds.setdefault(axis, (mesh.same_part(sharding), []))
        group[1].append(parameter)
    kinds[None][1].extend(model.buffers())
    for comm, tensors in kinds.values():
        if comm.size > 1:
            send_from_first(comm, tensors)


def _check_sharding(name: str, sharding: Sharding | None, mesh: MeshRanks) -> None:
    """Refuse a parameter that is divided along an axis that this mesh has not, or of data."""
    if sharding is None:
        return
    axis = sharding.axis
    if axis not in mesh.mesh or sharding.comm.size != mesh.mesh.size(axis):
        raise InvalidArgumentError(
            f"The parameter {name} is divided along {axis} between {sharding.comm.size} ranks, and "
            f"prepare got {mesh.mesh!r}. Divide it along an axis of this mesh."
        )
    if axis in DATA and axis != EXPERTS:
        raise InvalidArgumentError(
            f"The parameter {name} is divided along {axis}, where ranks see other data and bring "
            f"gradients of the same parameters together. Divide it along tp, or experts along ep; "
            f"strategy='zero3' divides parameters along {axis}."
        )


def _refuse(setup: Setup, strategy: Strategy, mesh: MeshRanks) -> None:
    """Refuse what would not be what one device does."""
    divided = [one for one in setup.parameters if one.name in mesh.shardings]
    for parameter in divided:
        kind = type(setup.optimizer.all[parameter.owner])
        if kind not in ELEMENTWISE and not getattr(kind, "elementwise", False):
            raise InvalidArgumentError(
                f"{kind.__name__} may compute with whole parameters, and of {parameter.name} each "
                f"rank along {mesh.axis_of(parameter.name)} has a part. Use an optimizer that "
                f"treats every element by itself: one of "
                f"{', '.join(sorted(one.__name__ for one in ELEMENTWISE))}, or a class of your own "
                f"that says so with elementwise = True."
            )
    experts = [name for name in mesh.shardings if mesh.axis_of(name) == EXPERTS]
    if experts:
        strategy.take_experts(setup, experts[0])
