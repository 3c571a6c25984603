"""A mesh as training sees it: which ranks have other data, and which other parts of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.parallel.sharding import Sharding, sharding_of
from roundelay.parallel.staging import Staging, staging_of

EXPERTS = "ep"
STAGES = "pp"
#: Axes along which ranks see other data, so that gradients are brought together along them.
DATA = ("dp", "cp", EXPERTS)
#: Those of them along which ranks have other rows; along cp they have other parts of the same ones.
ROWS = ("dp", EXPERTS)


class MeshRanks:
    """The ranks of a mesh in groups, each with this rank in it, and what they divide."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        #: How parameters are divided, by every name that they have.
        self.shardings: dict[str, Sharding] = {}
        #: Names of parameters that this rank, and all that have the same part of the model, save
        #: and count: of what several ranks of `beside` hold alike, the first has it.
        self.own: set[str] = set()
        #: Parameters and buffers that only other stages of a pipeline have.
        self.elsewhere: set[str] = set()
        #: Names of parameters here that another stage saves and counts, each with that stage's.
        self.aliases: dict[str, str] = {}
        #: What the model was before it was cut into stages, where a pipeline has cut it.
        self.staging: Staging | None = None

    def connect(self, label: Callable[[Communicator], Communicator]) -> None:
        """Make the groups. Every rank calls it."""
        mesh = self.mesh
        # Where one axis has all of these ranks, what the model sends along it is counted apart.
        models = [mesh[name] for name in mesh.axes if name != "dp" and mesh.size(name) > 1]

        def own(ranks: Communicator) -> Communicator:
            again = ranks.group(range(ranks.size)) if any(one is ranks for one in models) else None
            return label(again or ranks)

        self.everyone = own(mesh.comm)
        #: Ranks with other data, over which a strategy acts.
        self.data = own(along(mesh, DATA))
        #: Those of them that have the same experts.
        self.same_experts = label(along(mesh, ("dp", "cp")))
        self.experts = label(along(mesh, (EXPERTS,)))
        #: Ranks with the same data and other parts of the model.
        self.beside = label(along(mesh, set(mesh.axes) - {*DATA}))
        #: Those of them in the same stage of a pipeline, which end every backward pass together.
        self.with_same_modules = label(along(mesh, set(mesh.axes) - {*DATA, STAGES}))
        #: All ranks that have the same modules.
        self.alike = label(self.same_part(None))
        #: What `data` counts as its ranks, as the mesh counts them.
        self.numbers = mesh.ranks(*DATA)

    @property
    def alone(self) -> bool:
        """Whether every rank has other data, and no part of the model that others have not."""
        return self.mesh.size(*set(self.mesh.axes) - {*DATA}) == 1

    @property
    def staged(self) -> bool:
        """Whether ranks have other modules of the model."""
        return self.mesh.size(STAGES) > 1

    def stage(self, rank: int) -> int:
        """Return which stage of a pipeline a rank of the mesh is in."""
        names = [*self.mesh.axes]
        if STAGES not in names:
            return 0
        after = names[names.index(STAGES) + 1 :]
        return rank // self.mesh.size(*after) % self.mesh.size(STAGES)

    @property
    def first_of_stage(self) -> bool:
        """Whether this is the first rank of its stage of a pipeline, or of all."""
        return all(place == 0 for name, place in self.mesh.place.items() if name != STAGES)

    def same_part(self, sharding: Sharding | None) -> Communicator:
        """Return the ranks that hold the same elements of a parameter as this one."""
        apart = {STAGES} if sharding is None else {STAGES, sharding.axis}
        return along(self.mesh, set(self.mesh.axes) - apart)

    def learn(self, model: torch.nn.Module) -> None:
        """Know how the parameters are divided, and who has them. Every rank calls it."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        marks = {name: sharding_of(tensor) for name, tensor in parameters.items()}
        # One rank has all of it: nothing is divided, experts along an axis of one neither.
        found = {name: None if one is None or one.comm.size == 1 else one
                 for name, one in marks.items()}  # fmt: skip
        self.shardings = {name: one for name, one in found.items() if one is not None}
        self.staging = staging_of(model)
        first_names = {} if self.staging is None else self.staging.names
        places = self.mesh.place
        # The same parameter may have one name in one stage, and another in another.
        keys = [
            (name, first_names.get(name, name),
             -1 if sharding is None else places.get(sharding.axis, -1))
            for name, sharding in found.items()
        ]  # fmt: skip
        self._refuse_cuts(found, first_names)
        buffers = [name for name, _ in model.named_buffers()]
        every = self.beside.all_gather_object((keys, buffers))
        first: dict[tuple[str, int], tuple[int, str]] = {}
        for rank, (theirs, _) in enumerate(every):
            for name, whole, part in theirs:
                first.setdefault((whole, part), (rank, name))
        owners = {name: first[whole, part] for name, whole, part in keys}
        self.own = {name for name, (rank, _) in owners.items() if rank == self.beside.rank}
        self.aliases = {name: own for name, (rank, own) in owners.items()
                        if name != own and own not in parameters}  # fmt: skip
        names = {name for theirs, _ in every for name, _, _ in theirs}
        self.elsewhere = names.union(*(theirs for _, theirs in every))
        self.elsewhere -= parameters.keys() | {*buffers}

    def _refuse_cuts(self, found: dict[str, Sharding | None], first_names: dict[str, str]) -> None:
        """Refuse a parameter that stages share and divide in several ways."""
        if self.staging is None:
            return
        mine = {name: "whole" if one is None else f"{one.axis} in dim {one.dim} at {one.pieces}"
                for name, one in found.items()}  # fmt: skip
        ways: dict[str, tuple[str, str]] = {}
        for theirs in self.staging.comm.all_gather_object(mine):
            for name, way in theirs.items():
                other, before = ways.setdefault(first_names[name], (name, way))
                if way != before:
                    raise InvalidArgumentError(
                        f"{other} and {name} are one parameter in two stages of the pipeline, and "
                        f"the first is divided by {before}, the other by {way}. Divide both alike: "
                        f"'embedding' and 'column' cut alike."
                    )

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole parameter, of which this rank has so much."""
        sharding = self.shardings.get(name)
        return tuple(shape) if sharding is None else sharding.whole_shape(shape)

    def axis_of(self, name: str) -> str | None:
        """Return the axis that divides a parameter; None if ranks have it whole."""
        sharding = self.shardings.get(name)
        return None if sharding is None else sharding.axis

    def sent(self) -> dict[str, int] | None:
        """Return what this rank has sent along each axis, so far; of data, by the model alone.

        None where the engine does not count. Every rank calls it.
        """
        axes = [name for name, length in self.mesh.axes.items()
                if length > 1 and (name != "dp" or self.data.size > length)]  # fmt: skip
        found: dict[str, int] = {}
        for name in axes:
            traffic = self.mesh[name].traffic()
            if traffic is None:
                return None
            found[name] = traffic[self.mesh[name].rank].sent
        return found


def along(mesh: Mesh, names: Collection[str]) -> Communicator:
    """Return the ranks along some axes, of which a mesh may have none."""
    return mesh[tuple(name for name in mesh.axes if name in names)]


def rows_of(mesh: Mesh) -> Communicator:
    """Return the ranks between which the rows of a batch are divided."""
    return along(mesh, ROWS)


def together_on(comm: Communicator, call: str, work: Callable[[], Any]) -> Any:  # Any: its result
    """Do something on every rank; what is refused on one of them is refused on all."""
    result, problem = None, None
    try:
        result = work()
    except InvalidArgumentError as error:
        problem = error
    for rank, text in enumerate(comm.all_gather_object("" if problem is None else str(problem))):
        if text and problem is None:
            raise CollectiveMismatch(f"{call} was refused on rank {rank}: {text}")
    if problem is not None:
        raise problem
    return result
