"""Gradients made smaller while they travel."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # Any: for decompress
        """Return what travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return what came, as it was."""
        del ctx
        return tensor


class HalfCompressor(Compressor):
    """Sends floating point numbers as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return float16 for any kind of float, and the dtype it had."""
        if tensor.dtype.is_floating_point:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the dtype it had."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """What `compression=` takes; own ones have the methods of `Compressor`."""

    none = Compressor
    fp16 = HalfCompressor
