"""Synchronous workers: every step waits for all gradients, and all of them see the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._autograd import weakly
from roundelay.training._exchange import PassReport, refuse_broken, tell_all, told_bytes
from roundelay.training._refused_grad import RefusedGrad
from roundelay.training._setup import Setup, share_buffers
from roundelay.training._volume import add_up, buffers_volume, exchanged
from roundelay.training._whole_gradients import WholeGradients, drop
from roundelay.training.optimizer.masters import Masters
from roundelay.training.strategies.parameter_server._messages import (
    Kind,
    ServerReply,
    ServerRequest,
)
from roundelay.training.strategies.parameter_server._server_client import ServerClient
from roundelay.training.strategies.parameter_server.worker import Worker, evaluated
from roundelay.training.strategy import Held, Only, Volume, chosen

if TYPE_CHECKING:
    from roundelay.training.strategies.parameter_server.strategy import ParameterServer

WHY = (
    "The gradient of {0} is on the parameter server, which updates the parameters itself. "
    "Use optimizer.clip_grad_norm_(…) in place of torch's, and call zero_grad() before the next "
    "backward pass, or put all but the last one into `with rd.accumulate(model)`."
)


class _SyncWorker(Worker):
    """Pushes at the end of backward, and knows then what all workers know."""

    def __init__(self, options: ParameterServer, setup: Setup, client: ServerClient) -> None:
        super().__init__(options, setup, client)
        self._arrived: set[int] = set()

    def begin_backward(self) -> None:
        """Expect every gradient anew."""
        if self.setup.step.weighed and self.options.aggregate != "mean":
            raise InvalidArgumentError(
                "rd.backward asks for the exact mean over all ranks, and "
                "ParameterServer(aggregate=…) for something else. Use loss.backward() with it."
            )
        self._arrived = set()

    def grad_ready(self, index: int) -> None:
        """Copy the gradient to where it is sent from."""
        self._arrived.add(index)
        grad = self._tensors[index].grad
        if grad is not None:
            self._out[index].copy_(grad.detach())
            self._tensors[index].grad = None  # what all workers make of it comes back

    def _push(self, takes: str) -> PassReport:
        """Bring all gradients to the servers, and tell the other workers what they are."""
        used = []
        for index, tensor in enumerate(self._tensors):
            late = index not in self._arrived
            used.append(not late or tensor.grad is not None)
            if late and tensor.grad is not None:  # left by earlier micro-batches
                self.grad_ready(index)
            elif late:
                self._out[index].zero_()
        broken = self._not_finite()
        step = self.setup.step
        self.client.begin(ServerRequest(Kind.PUSH, weighed=step.weighed > 0), takes)
        mine = [index in broken for index in range(len(used))]
        # Answers first: the servers know if a worker has left, whom this would wait for in vain.
        replies = self.client.finish()
        told = tell_all(self.setup.comm, used, mine, step)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        self._count_staleness(replies)
        self.setup.used = set(np.flatnonzero(told.used).tolist())
        return told

    def after_step(self, only: Only = None) -> None:
        """Share the first worker's buffers."""
        super().after_step(only)
        share_buffers(self.setup, once=True)

    def told_volume(self) -> Volume:
        """Return what the workers tell one another in a step, besides what servers get."""
        told = exchanged(self.setup.comm, "all_reduce", told_bytes(len(self._tensors)), item=8)
        return add_up([told, buffers_volume(self.setup)])


class AggregatingWorker(WholeGradients, _SyncWorker):
    """Servers only aggregate: every worker has the whole gradient and steps by itself."""

    def __init__(
        self,
        options: ParameterServer,
        setup: Setup,
        client: ServerClient,
        masters: Masters | None,
    ) -> None:
        super().__init__(options, setup, client)
        self._in = self._by_index(client.grads, client.grads_in)
        self._masters = masters

    def backward_done(self) -> None:
        """Push, and take the aggregate."""
        self._take_back()
        told = self._push("grads")
        factor = told.factor()
        if self._masters is not None:
            grads = [one if used else None
                     for one, used in zip(self._in, told.used, strict=True)]  # fmt: skip
            self._masters.give(grads, factor=factor)
            return
        if factor is not None:
            for mine in self.client.grads_in:
                for buffer in mine:
                    buffer.mul_(factor)
        for tensor, grad, used in zip(self._tensors, self._in, told.used, strict=True):
            tensor.grad = grad.data.to(tensor.dtype) if used else None
        self._lent = {index: one.grad for index, one in enumerate(self._tensors)
                      if one.grad is not None}  # fmt: skip

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out and Ψ in for the gradients; a server has all workers'."""
        wire, sent = self.setup.precision.reduce, sum(share.nbytes for share in self._shares)
        waits = sent if wire is None or self._masters is not None else 0
        own = sum(self._tensors[at].nbytes for at in self.setup.used)
        volume = self.client.volume(pushes=True, takes="grads")
        return self._predicted(waits or own, volume, self.told_volume(), waits=waits)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are, also where they wait for masters."""
        return super()._gradients() if self._masters is None else self._masters.held()


class UpdatedWorker(_SyncWorker):
    """Servers aggregate and update: workers have no whole gradient, and pull parameters."""

    def __init__(self, options: ParameterServer, setup: Setup, client: ServerClient) -> None:
        super().__init__(options, setup, client)
        self._used = [False] * len(self._tensors)
        self._factors: list[float] = []  # that the servers have not heard of
        self._scales: dict[int, float] = {}  # likewise, of some parameters
        self._zeros: dict[int, torch.Tensor] = {}  # in place of gradients that were made zero

    def backward_done(self) -> None:
        """Push; the aggregate stays with the servers."""
        told = self._push("")
        factor = told.factor()
        self._factors, self._scales, self._zeros = [] if factor is None else [factor], {}, {}
        self._used = [bool(one) for one in told.used]
        named = zip(self.setup.parameters, self._used, strict=True)
        for index, (one, used) in enumerate(named):
            zero = weakly(self.zeroed, index)
            one.tensor.grad = RefusedGrad(one.tensor, WHY.format(one.name), zero) if used else None

    def zeroed(self, index: int) -> None:
        """Have a gradient be zero that the user makes so, as `model.zero_grad` does."""
        self.setup.step.did(f"zero_() into the gradient of {self.setup.parameters[index].name}")
        self.make_zero(index)

    def make_zero(self, index: int) -> None:
        """Have the servers multiply one gradient by zero."""
        self._scales[index] = 0.0
        # The next backward pass adds to it.
        self._tensors[index].grad = self._zeros[index] = torch.zeros_like(self._tensors[index])

    def done_to_grads(self, only: Only = None) -> list[tuple[str, str]]:
        """Say which the user has let go."""
        gone = [at for at in chosen(range(len(self._tensors)), only)
                if self._used[at] and self._tensors[at].grad is None]  # fmt: skip
        for index in gone:
            self._used[index] = False
        names = ", ".join(self.setup.parameters[index].name for index in gone)
        told = f"letting go of the gradients of {names}"
        return [(told, told)] if gone else []

    def _ask(
        self, kind: Kind, used: Sequence[float], takes: str = "", **more: Any
    ) -> list[ServerReply]:
        """Ask about the gradients, with all that the servers are still to multiply them with."""
        scales = [self._scales.get(index, 1.0) for index in range(len(self._tensors))]
        cut = zip(self._of_server(used), self._of_server(scales), strict=True)
        requests = [ServerRequest(kind, factors=self._factors, used=mine, scales=by, **more)
                    for mine, by in cut]  # fmt: skip
        self._factors, self._scales = [], {}
        return self.client.ask(requests, takes)

    def _meant(self, only: Only) -> list[float]:
        """Tell of each parameter whether it is meant and has a gradient."""
        has = [used and tensor.grad is not None
               for used, tensor in zip(self._used, self._tensors, strict=True)]  # fmt: skip
        return [float(one and (only is None or at in only)) for at, one in enumerate(has)]

    def grad_norm(self, norm_type: float, only: Only = None) -> float:
        """Put together the norms of all servers' aggregates."""
        meant = self._meant(only)
        replies = self._ask(Kind.NORM, meant, norm_type=norm_type)
        norms = [0.0] * len(self._tensors)
        for share, reply in zip(self._shares, replies, strict=True):
            for index, norm in zip(share.indexes, reply.values, strict=False):
                norms[index] = norm
        live = [torch.tensor(norm, dtype=torch.promote_types(tensor.dtype, torch.float32))
                for norm, tensor, used in zip(norms, self._tensors, meant, strict=True)
                if used]  # fmt: skip
        return float(torch.linalg.vector_norm(torch.stack(live), norm_type)) if live else 0.0

    def clamp_grads(self, value: float, only: Only = None) -> None:
        """Have the servers cut every element."""
        self._ask(Kind.CLAMP, self._meant(only), norm_type=value)

    def scale_grads(self, factor: float, only: Only = None) -> None:
        """Have the servers multiply, when they next hear from all workers."""
        if only is None and not self._scales:
            self._factors.append(factor)
            return
        for index in chosen(range(len(self._tensors)), only):
            self._scales[index] = self._scales.get(index, 1.0) * factor

    def step(self, own: Any, closure: Any, place: int = 0) -> Any:
        """Have the servers step the optimizer, with the options that it has here."""
        loss = evaluated(own, closure)
        numbers = self._options_now()
        meant = self._meant(self.setup.only(place))
        self._take(self._ask(Kind.STEP, meant, "values", options=numbers, place=place))
        return loss

    def forget(self, only: Only = None) -> None:
        """Let go of gradients: the servers' are overwritten by the next ones."""
        if only is None:
            self._factors, self._scales = [], {}
        for index in chosen(range(len(self._tensors)), only):
            self._used[index] = False
            self._zeros.pop(index, None)
        drop(self._tensors, only)

    def zero_grad(self, own: Any, *, set_to_none: bool, only: Only = None) -> None:
        """Forget gradients, or have the servers multiply theirs by zero."""
        if set_to_none:
            super().zero_grad(own, set_to_none=True, only=only)
            return
        if only is None:
            self._factors = [0.0]
        for index in chosen(range(len(self._tensors)), only):
            if self._used[index]:
                self.make_zero(index)

    def before_step(self, only: Only = None) -> None:
        """Refuse gradients that the servers have not seen."""
        del only
        for index, tensor in enumerate(self._tensors):
            grad = tensor.grad
            if not (
                grad is None or isinstance(grad, RefusedGrad) or grad is self._zeros.get(index)
            ):
                raise InvalidArgumentError(
                    f"The gradient of {self.setup.parameters[index].name} was set by hand, but the "
                    f"parameter server has the gradients of this step. Use "
                    f"ParameterServer(update='worker') or another strategy to change gradients."
                )

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out for gradients and Ψ in for parameters; a server has all workers'."""
        steps = [self.client.volume(pushes=False, takes="values")] * len(self.setup.optimizer.all)
        push = self.client.volume(pushes=True, takes="")
        return self._predicted(0, push, *steps, self.told_volume())
