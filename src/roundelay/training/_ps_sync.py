"""Synchronous workers: every step waits for all gradients, and all of them see the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._exchange import Told, refuse_broken, tell_all, told_bytes
from roundelay.training._masters import Masters, clamp, drop, multiply, norm_of
from roundelay.training._ps_layout import Share
from roundelay.training._ps_line import Line
from roundelay.training._ps_messages import Kind, Request
from roundelay.training._ps_sharing import Serving, evaluated
from roundelay.training._refused import Refused
from roundelay.training._setup import Setup, share_buffers
from roundelay.training._strategy import Held, Volume
from roundelay.training._volume import exchanged

if TYPE_CHECKING:
    from roundelay.training._ps_twin import Options
    from roundelay.training.strategies.parameter_server import ParameterServer

__all__ = ["Aggregated", "Stepped"]

WHY = (
    "The gradients of this step are on the parameter server, which updates the parameters itself. "
    "Use optimizer.clip_grad_norm_(…) in place of torch's, and call zero_grad() before the next "
    "backward pass, or put all but the last one into `with rd.accumulate(model)`."
)


class _Together(Serving):
    """Pushes at the end of backward, and knows then what all workers know."""

    def __init__(
        self, options: ParameterServer, setup: Setup, line: Line, grads: Sequence[Share]
    ) -> None:
        super().__init__(options, setup, line, grads)
        self._arrived: set[int] = set()

    def begin_backward(self) -> None:
        """Expect every gradient anew."""
        if self.setup.step.weighed and self.options.aggregate != "mean":
            raise InvalidArgumentError(
                "rd.backward asks for the exact mean over all ranks, and "
                "ParameterServer(aggregate=…) for something else. Use loss.backward() with it."
            )
        self._arrived = set()

    def arrived(self, index: int) -> None:
        """Copy the gradient to where it is sent from."""
        self._arrived.add(index)
        grad = self._tensors[index].grad
        if grad is not None:
            self._out[index].copy_(grad)
            self._tensors[index].grad = None  # what all workers make of it comes back

    def _push(self, takes: str) -> Told:
        """Bring all gradients to the servers, and tell the other workers what they are."""
        used = []
        for index, tensor in enumerate(self._tensors):
            late = index not in self._arrived
            used.append(not late or tensor.grad is not None)
            if late and tensor.grad is not None:  # left by earlier micro-batches
                self.arrived(index)
            elif late:
                self._out[index].zero_()
        broken = self._not_finite()
        step = self.setup.step
        self.line.begin(Request(Kind.PUSH, weighed=step.weighed > 0), takes)
        mine = [index in broken for index in range(len(used))]
        # Answers first: the servers know if a worker has left, whom this would wait for in vain.
        replies = self.line.finish()
        told = tell_all(self.setup.comm, used, mine, step)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        self._count_staleness(replies)
        return told

    def after_step(self) -> None:
        """Share the first worker's buffers."""
        share_buffers(self.setup)

    def told_volume(self) -> Volume:
        """Return what the workers tell one another in a step, besides what servers get."""
        return exchanged(self.setup.comm, "all_reduce", told_bytes(len(self._tensors)), item=8)


class Aggregated(_Together):
    """Servers only aggregate: every worker has the whole gradient and steps by itself."""

    def __init__(
        self,
        options: ParameterServer,
        setup: Setup,
        line: Line,
        grads: Sequence[Share],
        masters: Masters | None,
    ) -> None:
        super().__init__(options, setup, line, grads)
        self._in = self._by_index(grads, line.grads_in)
        self._masters = masters

    def gathered(self) -> None:
        """Push, and take the aggregate."""
        told = self._push("grads")
        factor = told.factor()
        if self._masters is not None:
            grads = [one if used else None
                     for one, used in zip(self._in, told.used, strict=True)]  # fmt: skip
            self._masters.give(grads, factor=factor)
            return
        if factor is not None:
            for mine in self.line.grads_in:
                for buffer in mine:
                    buffer.mul_(factor)
        for tensor, grad, used in zip(self._tensors, self._in, told.used, strict=True):
            tensor.grad = grad.to(tensor.dtype) if used else None

    def before_step(self) -> None:
        """Bring gradients to the masters."""
        if self._masters is not None:
            self._masters.ready()

    def after_step(self) -> None:
        """Round masters into the model, and share the first worker's buffers."""
        if self._masters is not None:
            self._masters.hand_out()
        super().after_step()

    def forget(self) -> None:
        """Let go of all gradients."""
        drop(self._masters, self._tensors)

    def zero_grad(self, own: Any, *, set_to_none: bool) -> None:
        """Forget the gradients, or make them zero."""
        if self._masters is not None and not set_to_none:
            self._masters.zero()
        else:
            super().zero_grad(own, set_to_none=set_to_none)

    def grad_norm(self, norm_type: float) -> float:
        """Return the norm of the aggregates, which every worker has whole."""
        return norm_of(self._masters, self._tensors, norm_type)

    def clamp_grads(self, value: float) -> None:
        """Cut every element of the averages."""
        clamp(self._masters, self._tensors, value)

    def take_edits(self) -> None:
        """Bring what the user has written into the model to the masters."""
        if self._masters is not None:
            self._masters.take_edits()

    def loaded(self, index: int, values: torch.Tensor) -> None:
        """Bring what was loaded to the master, unrounded."""
        if self._masters is not None:
            self._masters.tensors[index].copy_(values)

    def scale_grads(self, factor: float) -> None:
        """Multiply the aggregates."""
        multiply(self._masters, self._tensors, factor)

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out and Ψ in for the gradients; a server has all workers'."""
        return self._predicted(self.line.volume(pushes=True, takes="grads"), self.told_volume())


class Stepped(_Together):
    """Servers aggregate and update: workers have no whole gradient, and pull parameters."""

    def __init__(
        self,
        options: ParameterServer,
        setup: Setup,
        line: Line,
        grads: Sequence[Share],
        values: Sequence[Share],
        known: Options,
    ) -> None:
        super().__init__(options, setup, line, grads)
        self._known = known
        self._know_values(values)
        self._used = [False] * len(self._tensors)
        self._factors: list[float] = []  # that the servers have not heard of
        self._zeros: dict[int, torch.Tensor] = {}  # in place of gradients that were made zero

    def gathered(self) -> None:
        """Push; the aggregate stays with the servers."""
        told = self._push("")
        factor = told.factor()
        self._factors, self._zeros = [] if factor is None else [factor], {}
        self._used = [bool(one) for one in told.used]
        for tensor, used in zip(self._tensors, self._used, strict=True):
            tensor.grad = Refused(tensor, WHY) if used else None

    def grad_norm(self, norm_type: float) -> float:
        """Put together the norms of all servers' aggregates."""
        request = Request(Kind.NORM, norm_type=norm_type, factors=self._factors)
        replies = self.line.ask(request)
        self._factors = []
        norms = [0.0] * len(self._tensors)
        for share, reply in zip(self._shares, replies, strict=True):
            for index, norm in zip(share.indexes, reply.values, strict=False):
                norms[index] = norm
        live = [torch.tensor(norm, dtype=torch.promote_types(tensor.dtype, torch.float32))
                for norm, tensor, used in zip(norms, self._tensors, self._used, strict=True)
                if used]  # fmt: skip
        return float(torch.linalg.vector_norm(torch.stack(live), norm_type)) if live else 0.0

    def clamp_grads(self, value: float) -> None:
        """Have the servers cut every element."""
        self.line.ask(Request(Kind.CLAMP, norm_type=value, factors=self._factors))
        self._factors = []

    def scale_grads(self, factor: float) -> None:
        """Have the servers multiply, when they next hear from all workers."""
        self._factors.append(factor)

    def step(self, own: Any, closure: Any) -> Any:
        """Have the servers step the optimizer, with the options that it has here."""
        loss = evaluated(own, closure)
        optimizer = self.setup.optimizer
        server_options = self._known.read(optimizer)
        live = [float(used and tensor.grad is not None)
                for used, tensor in zip(self._used, self._tensors, strict=True)]  # fmt: skip
        requests = [
            Request(Kind.STEP, used=used, factors=self._factors, options=server_options)
            for used in self._of_server(live)
        ]
        self._factors = []
        self.line.ask(requests, "values")
        self._take()
        return loss

    def forget(self) -> None:
        """Let go of all gradients: the servers' are overwritten by the next ones."""
        self._factors, self._zeros = [], {}
        self._used = [False] * len(self._tensors)
        drop(None, self._tensors)

    def zero_grad(self, own: Any, *, set_to_none: bool) -> None:
        """Forget the gradients, or have the servers multiply theirs by zero."""
        if set_to_none:
            super().zero_grad(own, set_to_none=True)
            return
        self._factors = [0.0]
        self._zeros = {
            index: torch.zeros_like(tensor)
            for index, tensor in enumerate(self._tensors)
            if self._used[index]
        }
        for index, zeros in self._zeros.items():
            self._tensors[index].grad = zeros  # the next backward pass adds to it

    def before_step(self) -> None:
        """Refuse gradients that the servers have not seen."""
        for index, tensor in enumerate(self._tensors):
            grad = tensor.grad
            if not (grad is None or isinstance(grad, Refused) or grad is self._zeros.get(index)):
                raise InvalidArgumentError(
                    f"The gradient of {self.setup.parameters[index].name} was set by hand, but the "
                    f"parameter server has the gradients of this step. Use "
                    f"ParameterServer(update='worker') or another strategy to change gradients."
                )

    def pull(self) -> None:
        """Take the servers' parameters as they are now."""
        self.line.ask(Request(Kind.PULL), "values")
        self._take()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state with the parameters as the servers have them."""
        return self._pulled_state()

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out for gradients and Ψ in for parameters; a server has all workers'."""
        return self._predicted(
            self.line.volume(pushes=True, takes=""),
            self.line.volume(pushes=False, takes="values"),
            self.told_volume(),
        )
