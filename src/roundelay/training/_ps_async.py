"""Workers that do not wait for one another: each gradient is applied as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import InvalidArgumentError, NotFiniteError
from roundelay.training._exchange import finite
from roundelay.training._masters import clamp, drop
from roundelay.training._ps_layout import Share
from roundelay.training._ps_line import Line
from roundelay.training._ps_messages import Kind, Request
from roundelay.training._ps_sharing import Serving, evaluated
from roundelay.training._setup import Setup
from roundelay.training._strategy import Held, Volume

if TYPE_CHECKING:
    from roundelay.training._ps_twin import Options
    from roundelay.training.strategies.parameter_server import ParameterServer

__all__ = ["Alone"]


class Alone(Serving):
    """Gradients stay this worker's own until the step, which brings them to the servers."""

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
        self._know_values(values)
        self._known = known
        self._versions = [0] * len(line.servers)  # of the parameters that the model has
        self._pushes = 0

    compares = False  # every worker has weights of its own age

    def arrived(self, index: int) -> None:
        """Leave the gradient where it is."""

    def gathered(self) -> None:
        """Make the mean of this worker's losses, and see that it is finite."""
        grads = {index: one.grad for index, one in enumerate(self._tensors) if one.grad is not None}
        if self.options.check_finite:
            broken = [index for index, grad in grads.items() if not finite(grad)]
            if broken:
                names = [self.setup.parameters[index].name for index in broken]
                error = NotFiniteError(names, [self.setup.comm.rank])
                self.line.tell_failure(error)
                raise error
        step = self.setup.step
        if step.weighed:
            if step.weight == 0:
                raise InvalidArgumentError("All weights of this step are 0, so there is no mean.")
            self.scale_grads(1 / step.weight)

    def abandon(self, *, whole: bool) -> None:
        """Do nothing: nobody waits for this worker's gradients."""

    def grad_norm(self, norm_type: float) -> float:
        """Return the norm of this worker's gradient, which is applied by itself."""
        grads = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads, norm_type))

    def clamp_grads(self, value: float) -> None:
        """Cut every element of this worker's gradient."""
        clamp(None, self._tensors, value)

    def scale_grads(self, factor: float) -> None:
        """Multiply this worker's gradient."""
        for tensor in self._tensors:
            if tensor.grad is not None:
                tensor.grad.mul_(factor)

    def step(self, own: Any, closure: Any) -> Any:
        """Push the gradients, have them applied, and pull; wait if too far ahead of others."""
        loss = evaluated(own, closure)
        used = []
        for tensor, out in zip(self._tensors, self._out, strict=True):
            used.append(float(tensor.grad is not None))
            if tensor.grad is None:
                out.zero_()
            else:
                out.copy_(tensor.grad)
        self._pushes += 1
        numbers = self._known.read(self.setup.optimizer)
        requests = [
            Request(Kind.APPLY, self._pushes, version, used=mine, options=numbers)
            for version, mine in zip(self._versions, self._of_server(used), strict=True)
        ]
        replies = self.line.ask(requests, "values")
        self._versions = [reply.version for reply in replies]
        self._count_staleness(replies)
        self._take()
        return loss

    def forget(self) -> None:
        """Let go of all gradients."""
        drop(None, self._tensors)

    def pull(self) -> None:
        """Take the servers' parameters as they are now."""
        replies = self.line.ask(Request(Kind.PULL), "values")
        self._versions = [reply.version for reply in replies]
        self._take()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state with the parameters as the servers have them, once all workers ask."""
        return self._pulled_state()

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out for the gradient and Ψ in for the parameters; a server has all workers'."""
        return self._predicted(self.line.volume(pushes=True, takes="values"))
