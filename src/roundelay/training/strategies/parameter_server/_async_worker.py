"""Workers that do not wait for one another: each gradient is applied as it comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from roundelay.errors import InvalidArgumentError, NotFiniteError
from roundelay.training._intake import finite
from roundelay.training._whole_gradients import clamp, drop, norm_of, scale
from roundelay.training.strategies.parameter_server._messages import Kind, ServerRequest
from roundelay.training.strategies.parameter_server.worker import Worker, evaluated
from roundelay.training.strategy import Held, Only, Volume


class AsyncWorker(Worker):
    """Gradients stay this worker's own until the step, which brings them to the servers."""

    compares = False  # every worker has weights of its own age
    _pushes = 0

    def grad_ready(self, index: int) -> None:
        """Leave the gradient where it is."""

    def backward_done(self) -> None:
        """Make the mean of this worker's losses, and see that it is finite."""
        grads = {
            index: tensor.grad
            for index, tensor in enumerate(self._tensors)
            if tensor.grad is not None
        }
        self.setup.used = set(grads)
        if self.options.check_finite:
            broken = [index for index, grad in grads.items() if not finite(grad)]
            if broken:
                names = [self.setup.parameters[index].name for index in broken]
                error = NotFiniteError(names, [self.setup.comm.rank])
                self.client.tell_failure(error)
                raise error
        step = self.setup.step
        if step.weighed:
            if step.weight == 0:
                raise InvalidArgumentError("All weights of this step are 0, so there is no mean.")
            self.scale_grads(1 / step.weight)

    def abandon(self, *, whole: bool) -> None:
        """Do nothing: nobody waits for this worker's gradients."""

    def grad_norm(self, norm_type: float, only: Only = None) -> float:
        """Return the norm of this worker's gradient, which is applied by itself."""
        return norm_of(self._tensors, norm_type, only)

    def clamp_grads(self, value: float, only: Only = None) -> None:
        """Cut every element of this worker's gradient."""
        clamp(self._tensors, value, only)

    def scale_grads(self, factor: float, only: Only = None) -> None:
        """Multiply this worker's gradient."""
        scale(self._tensors, factor, only)

    def step(self, own: Any, closure: Any, place: int = 0) -> Any:
        """Push the gradients, have them applied, and pull; wait if too far ahead of others."""
        loss = evaluated(own, closure)
        only = self.setup.only(place)
        used = []
        for index, (tensor, out) in enumerate(zip(self._tensors, self._out, strict=True)):
            grad = tensor.grad if only is None or index in only else None
            used.append(float(grad is not None))
            if grad is None:
                out.zero_()
            else:
                out.copy_(grad.detach())  # which users may have given a graph
        self._pushes += 1
        numbers = self._options_now()
        requests = [
            ServerRequest(
                Kind.APPLY, self._pushes, version, place=place, used=mine, options=numbers
            )
            for version, mine in zip(self._versions, self._of_server(used), strict=True)
        ]
        replies = self.client.ask(requests, "values")
        self._count_staleness(replies)
        self._take(replies)
        return loss

    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""
        drop(self._tensors, only)

    def predicted(self) -> tuple[Held, Volume]:
        """Say Ψ out for the gradient and Ψ in for the parameters; a server has all workers'."""
        steps = [self.client.volume(pushes=True, takes="values")] * len(self.setup.optimizer.all)
        return self._predicted(sum(self._tensors[at].nbytes for at in self.setup.used), *steps)

    def ever_used(self) -> Collection[int]:
        """Return the parameters that any worker has stepped on, as the server here knows."""
        server, mine = self.client.server, self._own_share
        if server is None or mine is None:
            return ()
        return [
            at for at, used in zip(mine.indexes, server.gradients.ever_used, strict=True) if used
        ]
