"""Batch norm over the rows of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import Sum
from roundelay.fronts.horovod.torch.autograd import allreduce
from roundelay.fronts.horovod.torch.checks import tensor_of

__all__ = ["BatchNormOfAllRanks"]


class BatchNormOfAllRanks(_BatchNorm):
    """`hvd.SyncBatchNorm`: outputs, gradients and statistics of one device with everybody's rows.

    It costs two small all-reduces in forward, and two in backward.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if tensor_of("SyncBatchNorm", input).dim() < 2:  # noqa: PLR2004 - rows, channels
            raise InvalidArgumentError(
                f"hvd.SyncBatchNorm takes (rows, channels, …), not {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalize by the mean and variance over all ranks; in evaluation by the running ones."""
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        dims = [dim for dim in range(input.dim()) if dim != 1]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        rows = x.new_full((1,), x.numel() / max(1, x.shape[1]))
        totals = allreduce(torch.cat([x.sum(dims), rows]), op=Sum)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        apart = x - mean.view(shape)
        var = allreduce(apart.square().sum(dims), op=Sum) / count
        self._remember(mean.detach(), var.detach(), count)
        result: Any = apart * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        whole: torch.Tensor = result.to(input.dtype)
        return whole

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = var * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
