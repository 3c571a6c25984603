"""The sum of sparse tensors: every rank gets the indices and values of all."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, UnsupportedReductionError
from roundelay.torch._calls import CommCall

__all__ = ["sparse_sum"]


def sparse_sum(comm: Communicator, tensor: Tensor, op: str) -> CommCall:
    """All-reduce a COO tensor, in place, as gloo does: what several ranks have is added up."""
    if op != "sum":
        raise UnsupportedReductionError(
            f"all_reduce of sparse tensors has sum only, not {op}. Pass tensor.to_dense()."
        )
    return CommCall("sparse_sum", (), run=partial(_sum, comm, tensor))


def _sum(comm: Communicator, tensor: Tensor) -> None:
    mine = tensor.detach().coalesce()
    shape = [*mine.shape, mine.sparse_dim()]
    # How much each rank has comes first, and whether they speak of the same tensor at all.
    table = comm.all_gather(np.array([mine.indices().shape[1], *shape], np.int64)).tolist()
    odd = [rank for rank, row in enumerate(table) if row[1:] != shape]
    if odd:
        raise CollectiveMismatch(
            f"all_reduce of sparse tensors needs one shape: rank {comm.rank} has {shape[:-1]}, "
            f"but ranks {odd} have others."
        )
    counts = [row[0] for row in table]
    indices = comm.all_gather(mine.indices().t().contiguous(), axis=0, counts=counts)
    values = comm.all_gather(mine.values().contiguous(), axis=0, counts=counts)
    with torch.no_grad():
        whole = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False)
        tensor.copy_(whole.coalesce())
