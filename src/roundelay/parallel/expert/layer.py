"""`rd.MoE`: a mixture of experts, which ranks of an axis have between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.expert.direct_gradients import count_whole, through_dispatch
from roundelay.parallel.expert.dispatch import planned
from roundelay.parallel.expert.router import Queues, Router, Routing
from roundelay.parallel.functions import counts_of
from roundelay.parallel.passes import layer_number
from roundelay.parallel.sharding import Sharding, mark_divided, sharding_of, take_whole

__all__ = ["MoE", "average_gradients", "balance_loss"]

COUNTED = 40  # bits of a count of tokens


class MoE(nn.Module):
    """Send every token to its experts, wherever they are, and add up what they say.

    `experts` are modules that are built alike, or a function that makes one; all have parameters
    under the same names, which are kept stacked: `moe.experts.up.weight` has a dim in front, with
    an entry for each expert. Of these every rank of `comm` has its own (the first ranks one more
    where they do not divide), marked as a `Sharding` of dim 0 along `axis`. Ranks bring tokens of
    their own, as many as they like, also none. All of them call forward, and backward.

    After a forward pass `balance_loss` is a loss that is least when all experts have as much to
    do, `load` how often each was chosen and `dropped` how many choices were dropped, both of all
    ranks of `comm`. The mean of their `balance_loss` is that of one device with all their tokens.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module] | Callable[[], nn.Module],
        router: Router,
        comm: Communicator | None = None,
        *,
        axis: str = "ep",
    ) -> None:
        super().__init__()
        self.comm, self.axis = comm, axis
        #: How much this rank's loss weighs beside those of others; who trains it says so.
        self.loss_weight: Callable[[], float] | None = None
        problem, mine = _checked(experts, router, comm)
        _compare(problem, _description(router, mine), comm)
        #: By which ranks see that they are in the same layer: all make them in one order.
        self._number = 0 if comm is None else layer_number(comm, self)
        self.router = router
        self.experts = _stacked(mine, _sharding(axis, comm, router.experts))
        self._forget()
        if comm is not None:
            with torch.no_grad():
                for parameter in router.parameters():
                    parameter.copy_(comm.broadcast(parameter.detach().clone().contiguous()))

    def _forget(self) -> None:
        """Know nothing of any tokens."""
        self.balance_loss = torch.zeros(())
        self.load = torch.zeros(self.router.experts, dtype=torch.int64)
        self.dropped = 0

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each token, a row of the last dim, the weighted sum of its experts."""
        width = self.router.score.in_features
        if x.dim() == 0 or x.shape[-1] != width:
            raise InvalidArgumentError(
                f"MoE takes tokens of {width} features, as its router does, in the last dim of a "
                f"tensor, not one of shape {tuple(x.shape)}."
            )
        tokens = x.reshape(-1, width)
        routing: Routing = self.router(tokens)
        counts = self._everywhere(routing.counts())
        queues = Queues(counts, self.router.capacity_factor)
        taken = queues.taken()
        self._account(routing, counts, int(counts.sum() - taken.sum()))
        kept = queues.kept(routing, 0 if self.comm is None else self.comm.rank)
        plan = planned(routing.experts, kept, taken, self.comm, self.loss_weight)
        said = [
            _said(functional_call(self.experts, parameters, (rows,)), rows)
            for parameters, rows in zip(self._each(), plan.scatter(tokens), strict=True)
        ]
        result = plan.gather(said, routing.weights)
        return result.view(*x.shape[:-1], *result.shape[1:])

    def _each(self) -> list[dict[str, torch.Tensor]]:
        """Return the parameters of each expert that is here."""
        # unbind and not an index each: its backward stacks the gradients, once.
        parts = {name: through_dispatch(value).unbind(0)
                 for name, value in self.experts.named_parameters()}  # fmt: skip
        count = len(next(iter(parts.values())))
        # A view each: where a pipeline cuts a backward pass in halves, a parameter that two experts
        # come to is walked as one that is used twice, and ranks with one expert walk another way.
        return [{name: value[at].view_as(value[at]) for name, value in parts.items()}
                for at in range(count)]  # fmt: skip

    def _everywhere(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the counts of every rank."""
        if self.comm is None or self.comm.size == 1:
            return counts[None]
        counts = counts.contiguous()
        counts.view(-1)[0] += self._number << COUNTED  # in bits that no count has
        every = self.comm.all_gather(counts)
        firsts = every.flatten(1)[:, 0]
        numbers = (firsts >> COUNTED).tolist()
        firsts &= (1 << COUNTED) - 1
        if len({*numbers}) > 1:
            raise CollectiveMismatch(
                f"Ranks of {self.axis} have called different layers of rd.MoE at once, by the "
                f"order in which they were made: {', '.join(map(str, numbers))}. Call the same "
                f"ones on every rank: ranks that skip some at random need the same seed."
            )
        return every

    def _account(self, routing: Routing, counts: torch.Tensor, dropped: int) -> None:
        """Keep how even the load is: as numbers, and as a loss."""
        load = counts.sum((0, 1))
        choices = int(load.sum())
        self.load, self.dropped = load, dropped
        tokens = choices / self.router.top_k / counts.shape[0]  # of a rank, on average
        wanted = routing.probabilities.sum(0) / max(tokens, 1 / counts.shape[0])
        shares = load.to(wanted.dtype) / max(choices, 1)
        self.balance_loss = self.router.experts * (shares * wanted).sum()

    def extra_repr(self) -> str:
        """Say what a printed model should show."""
        ranks = 1 if self.comm is None else self.comm.size
        return f"{self.router.experts} experts on {ranks} rank{'s' * (ranks > 1)}"


def _said(output: object, rows: torch.Tensor) -> torch.Tensor:
    """Return what an expert made of its rows; refuse what has not one for each."""
    if isinstance(output, torch.Tensor) and output.dim() and len(output) == len(rows):
        return output
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise InvalidArgumentError(
        f"An expert of MoE gets {len(rows)} tokens and returns a tensor with a row for each, not "
        f"{type(output).__name__}{shape}."
    )


def balance_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of `balance_loss` of all mixtures in a model, of their last forward pass."""
    losses = [module.balance_loss for module in model.modules() if isinstance(module, MoE)]
    if not losses:
        raise InvalidArgumentError("balance_loss: the model has no rd.MoE.")
    return torch.stack([loss.to(losses[0]) for loss in losses]).sum()


def average_gradients(model: nn.Module, comm: Communicator, *, axis: str = "ep") -> None:
    """Make all gradients those of the mean of the ranks' losses, where nothing else does so.

    Gradients of parameters that all ranks have are averaged. Those of experts are there already,
    as sums over all ranks, whose tokens have come to them.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        sharding = sharding_of(parameter)
        if sharding is not None and sharding.axis == axis:
            parameter.grad /= comm.size
        else:
            parameter.grad = comm.all_reduce(parameter.grad.contiguous(), "avg")


def _checked(
    experts: Any, router: Any, comm: Any
) -> tuple[str, list[nn.Module]]:  # Any: what callers bring
    """Return what is wrong with the arguments, and the experts of this rank."""
    if comm is not None and not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"MoE needs comm=, a communicator such as mesh['ep'], or None for one device, "
            f"not {shown(comm)}."
        )
    if not isinstance(router, Router):
        return f"MoE needs an rd.Router as router, not {shown(router)}.", []
    if comm is not None and comm.size > router.experts:
        return (
            f"MoE: {comm.size} ranks are more than {router.experts} experts. Take as many experts "
            f"as ranks or more, or a shorter axis."
        ), []
    mine = _own(router.experts, comm)
    if callable(experts) and not isinstance(experts, nn.Module):
        # All are made, so that ranks draw the same numbers as one device; few are kept.
        every = ((number, experts()) for number in range(router.experts))
        modules = [module for number, module in every if number in mine]
    elif isinstance(experts, Sequence | nn.ModuleList):
        if len(experts) != router.experts:
            return f"MoE has {len(experts)} experts, and its router {router.experts}.", []
        modules = list(experts)
    else:
        modules = []
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        return f"MoE needs modules, or a function that makes one, not {shown(experts)}.", []
    problem = _unlike(modules)
    return problem, modules if len(modules) == len(mine) else modules[mine.start : mine.stop]


def _own(experts: int, comm: Communicator | None) -> range:
    """Return the numbers of the experts that this rank has."""
    if comm is None:
        return range(experts)
    owned = counts_of(experts, comm.size)
    first = sum(owned[: comm.rank])
    return range(first, first + owned[comm.rank])


def _unlike(modules: list[nn.Module]) -> str:
    """Return in what an expert differs from the first; nothing if it does not."""
    names = _layout(modules[0])
    for number, module in enumerate(modules):
        if any(True for _ in module.buffers()):
            return f"MoE: expert {number} has buffers, which can't be stacked. Use parameters."
        if _layout(module) != names:
            return (
                f"MoE: expert {number} is not built like expert 0: all have the same modules, "
                f"options and parameters."
            )
        if not names:
            return "MoE: experts without parameters have nothing to divide."
    return ""


def _layout(module: nn.Module) -> dict[str, str]:
    layout = {
        name: f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"
        for name, value in module.named_parameters()
    }
    return layout and layout | {
        f"module {name}": _built(one) for name, one in module.named_modules()
    }


def _built(module: nn.Module) -> str:
    """Return how a module is built, in words: one expert's code runs for all."""
    own = {key: value for key, value in vars(module).items()
           if type(value) in (bool, int, float, str) and key != "training"}  # fmt: skip
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()}) {sorted(own.items())}"


def _description(router: Any, modules: list[nn.Module]) -> str:
    """Return in words what all ranks must have alike."""
    if not isinstance(router, Router) or not modules:
        return ""
    return f"{router.extra_repr()}, normalize={router.normalize}, {_layout(modules[0])}"


def _compare(problem: str, mine: str, comm: Communicator | None) -> None:
    """Refuse what is wrong on any rank, or differs between ranks."""
    every = [[problem, mine]] if comm is None else comm.all_gather_object([problem, mine])
    if problem:
        raise InvalidArgumentError(problem)
    for rank, (theirs, description) in enumerate(every):
        if theirs:
            raise CollectiveMismatch(f"MoE was refused on rank {rank}: {theirs}")
        if description != mine:
            raise CollectiveMismatch(
                f"All ranks make the same MoE, but here it has {mine}, and on rank {rank} "
                f"{description}."
            )


def _sharding(axis: str, comm: Communicator | None, experts: int) -> Sharding | None:
    if comm is None:
        return None
    stops = list(accumulate(counts_of(experts, comm.size)))
    pieces = tuple(((start, stop),) for start, stop in pairwise([0, *stops]))
    return Sharding(axis, comm, 0, pieces, by="experts")


def _stacked(modules: list[nn.Module], sharding: Sharding | None) -> nn.Module:
    """Return the first module with the parameters of all, a dim in front counting them."""
    template = modules[0]
    parts = [dict(module.named_parameters()) for module in modules]
    stacked: dict[int, nn.Parameter] = {}
    for name, value in list(template.named_parameters(remove_duplicate=False)):
        holder = template.get_submodule(name.rpartition(".")[0])
        if id(value) not in stacked:
            whole = torch.stack([mine[name].detach() for mine in parts])
            parameter = nn.Parameter(whole, requires_grad=value.requires_grad)
            if sharding is not None:
                mark_divided(parameter, sharding)
                count_whole(parameter)
            stacked[id(value)] = parameter
        setattr(holder, name.rpartition(".")[2], stacked[id(value)])
    hooked: list[Any] = [] if sharding is None else [*template.modules()]  # Any: torch's
    for module in hooked:
        module.register_load_state_dict_pre_hook(take_whole)
    return template
