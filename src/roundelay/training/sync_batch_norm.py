"""`rd.SyncBatchNorm`: batch statistics over the rows of all ranks, as one device has them."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from roundelay.arguments import shown, whole
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.passes import going_back, number_of
from roundelay.training._autograd import kept
from roundelay.training._run import Run, refuse_prepared

__all__ = ["SyncBatchNorm", "join_norms"]

Model = TypeVar("Model", bound=torch.nn.Module)


class _Link:
    """By which ranks a layer's statistics are added up; copies share it where the user said it."""

    def __init__(self, comm: Communicator, *, said: bool) -> None:
        # Of its own: gradients travel in the background of the other one, in their own order.
        self.comm = comm.group(range(comm.size)) or comm
        self.comm.follow_timeout(comm)
        self.run: weakref.ref[Run] | None = None  # of the prepared model
        self._said = said

    def __deepcopy__(self, _: object) -> _Link | None:
        # A copy of a prepared model is not prepared.
        return self if self._said else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # ranks are not pickled


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is a sum over ranks, and so on."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, link: _Link, comm: Communicator
    ) -> torch.Tensor:  # Any: torch's
        """Return the sum of what all ranks have."""
        ctx.link, ctx.number = link, number_of(link.comm)
        total: torch.Tensor = comm.all_reduce(x.detach().clone())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Add up gradients; where a loader weighs those of this rank, they weigh here already.

        What `torch.autograd.grad` asks for is the caller's own, and nothing weighs it.
        """
        link: _Link = ctx.link
        run = None if link.run is None else link.run()
        weighs = run is not None and any(
            kept(parameter.tensor) for parameter in run.setup.parameters
        )
        factor = run.step.factor if run is not None and weighs else 1.0
        mine = _times(grads[0], factor)
        with going_back("SyncBatchNorm", link.comm, ctx.number) as ranks:
            total = _Sum.apply(mine, link, ranks)  # type: ignore[no-untyped-call]
        return _times(total, 1 / factor if factor else 0.0), None, None


def _times(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply; a mean over no rows, which is NaN, is 0, and still what was computed from it."""
    if factor:
        return grad * factor if factor != 1 else grad
    return grad.masked_fill(torch.ones_like(grad, dtype=torch.bool), 0)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the rows of all ranks: outputs, gradients and statistics of one device.

    For inputs of 2 dims and more, however many rows each rank has. The ranks are those that train
    the prepared model, or of `comm`, where every rank makes the layer. It costs two small
    all-reduces in forward and two in backward; statistics have at least float32.
    """

    #: What mixed precision asks: running statistics stay in the dtype they have.
    keeps_statistics = True
    _link: _Link | None = None

    def __init__(
        self, num_features: int, *args: Any, comm: Communicator | None = None, **options: Any
    ) -> None:
        super().__init__(whole("num_features", num_features, 0, 1 << 31), *args, **options)
        if comm is not None:
            _check_comm(comm)
            self._link = _Link(comm, said=True)

    @classmethod
    def convert(cls, model: Model, comm: Communicator | None = None) -> Model:
        """Make every batch norm of a model one of these, in place: parameters and hooks stay.

        Before `rd.prepare`, by which the layers learn of their ranks; or with `comm`, on all ranks.
        """
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgumentError(f"convert takes a torch.nn.Module, not {shown(model)}.")
        if comm is not None:
            _check_comm(comm)
        refuse_prepared(model)
        norms = {name: one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}
        known = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
        for name, module in norms.items():
            if isinstance(module, LazyModuleMixin) or type(module).forward not in known:
                raise InvalidArgumentError(
                    f"SyncBatchNorm.convert can't take {name or 'the model'}, a "
                    f"{type(module).__name__}, which computes in its own way. Call the model once "
                    f"before if it is lazy, or put an rd.SyncBatchNorm there."
                )
        link = None if comm is None else _Link(comm, said=True)
        for module in norms.values():
            module.__class__ = cls
            if link is not None:
                vars(module)["_link"] = link
        return model

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2 or input.size(1) != self.num_features:  # noqa: PLR2004 - rows, channels
            raise InvalidArgumentError(
                f"SyncBatchNorm takes (rows, {self.num_features}, …), not {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalize channels by their mean and variance over all ranks, or by the running ones."""
        self._check_input_dim(input)
        exact = torch.promote_types(input.dtype, torch.float32)
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        x = input.to(exact)
        if self.training or self.running_mean is None or self.running_var is None:
            mean, var = self._statistics(x, shape)
        else:
            mean, var = self.running_mean, self.running_var
        scale = (var + self.eps).rsqrt().to(exact)
        if self.weight is not None:
            scale = scale * self.weight
        result = (x - mean.to(exact).view(shape)) * scale.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result.to(input.dtype)

    def _statistics(
        self, x: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance over all ranks, in float64, and keep them in mind."""
        dims = [0, *range(2, x.dim())]
        here = x.new_tensor([x.numel() // max(1, x.size(1))], dtype=torch.float64)
        sums = self._sum(torch.cat([x.sum(dims).double(), here]))
        count = int(sums[-1])
        if count < 2:  # noqa: PLR2004 - of one there is no variance
            raise InvalidArgumentError(
                f"SyncBatchNorm needs more than one value for each channel over all ranks, and has "
                f"{count}, in a batch of {tuple(x.shape)} on this rank."
            )
        mean = sums[:-1] / count
        centred = x - mean.to(x.dtype).view(shape)
        var = self._sum(centred.square().sum(dims).double()) / count
        # Inside a backward pass this is gradient checkpointing, which computes once more.
        if self.training and torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - torch has no other name
            self._keep(mean.detach(), var.detach() * (count / (count - 1)))
        return mean, var

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        link = self._link
        if link is None or link.comm.size == 1:
            return x
        total: torch.Tensor = _Sum.apply(x, link, link.comm)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1 / float(self.num_batches_tracked)
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running.lerp_(now.to(running.dtype), share or 0.0)


def _check_comm(comm: object) -> None:
    if not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"comm of SyncBatchNorm is the communicator of rd.init() or rd.run, not {shown(comm)}."
        )


class _Joined:
    """Layers that learned of their ranks by `prepare`, and forget them when it is taken back."""

    def __init__(self, layers: list[SyncBatchNorm], link: _Link) -> None:
        self._layers, self._link = layers, link

    def remove(self) -> None:
        """Have the layers be those of one device."""
        for layer in self._layers:
            if layer._link is self._link:  # noqa: SLF001 - the other half of it
                layer._link = None  # noqa: SLF001


def join_norms(run: Run) -> None:
    """Tell the layers of a prepared model which ranks train it. Every rank calls it."""
    layers = [module for module in run.setup.model.modules() if isinstance(module, SyncBatchNorm)]
    alone = [one for one in layers if one._link is None]  # noqa: SLF001 - likewise
    if alone:
        link = _Link(run.comm, said=False)
        run.hooks.append(_Joined(alone, link))
        for layer in alone:
            layer._link = link  # noqa: SLF001
    for layer in layers:
        if layer._link is not None:  # noqa: SLF001
            layer._link.run = weakref.ref(run)  # noqa: SLF001
