"""Sparse gradients, as `Embedding(sparse=True)` gives them, and who takes them."""

from __future__ import annotations

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.training._setup import Setup
from roundelay.training.strategy import Strategy

#: What comes to the same on a sparse gradient and on a dense one, where rows of zeros are none.
SAME = (torch.optim.SGD, torch.optim.Adagrad)


def sparse_parameters(setup: Setup) -> list[int]:
    """Return the numbers of the parameters whose modules say that their gradients are sparse."""
    told = {
        id(module.weight)
        for module in setup.model.modules()
        if getattr(module, "sparse", False) is True
        and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    }
    return [at for at, parameter in enumerate(setup.parameters) if id(parameter.tensor) in told]


def refuse_odd(strategy: Strategy, setup: Setup) -> None:
    """Refuse complex parameters, and gradients that must stay sparse, where a strategy has none."""
    word = type(strategy).__name__
    if not strategy.takes_odd or setup.precision.mixed:
        how = "in mixed precision" if strategy.takes_odd else f"under {word}"
        for one in (setup.parameters[at] for at in sparse_parameters(setup)):
            own = type(setup.optimizer.all[one.owner])
            if own not in SAME:
                raise InvalidArgumentError(
                    f"The gradient of {one.name} is sparse, which {how} is made dense, and "
                    f"{own.__name__} may do otherwise then. Step on it with SGD or Adagrad, build "
                    f"its module with sparse=False, or use strategy='ddp' in fp32."
                )
    unreal = [parameter.name for parameter in setup.parameters if parameter.tensor.is_complex()]
    if unreal and not strategy.takes_odd:
        raise InvalidArgumentError(
            f"The parameter {unreal[0]} is complex, which under {word} is not possible. Keep it as "
            f"real numbers (torch.view_as_real), or use strategy='ddp'."
        )


def add_up_rows(comm: Communicator, grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' gradients, sparse as they are. Every rank calls it.

    Only rows that there are travel. Where a rank has a dense one, a tied weight for example, the
    sum is dense, as on one device.
    """
    dense = grad is not None and not grad.is_sparse
    mine = None if grad is None or dense else grad.detach().coalesce()
    count = 0 if mine is None else mine.indices().shape[1]
    dims = 1 if mine is None else mine.sparse_dim()
    every = comm.all_gather(np.array([count, dense, dims], np.int64))
    if every[:, 1].any():
        whole = torch.zeros_like(like) if grad is None else grad.detach()
        whole = whole.to_dense() if whole.is_sparse else whole.contiguous()
        comm.all_reduce(_real(whole))
        return whole
    counts, dims = every[:, 0].tolist(), int(every[:, 2].max())
    places = torch.empty(0, dims, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[dims:], dtype=like.dtype, device=like.device)
    if mine is not None:
        places, values = mine.indices().T.contiguous(), mine.values().contiguous()
    if any(counts):
        places = comm.all_gather(places, axis=0, counts=counts)
        values = comm.all_gather(values, axis=0, counts=counts)
    found = torch.sparse_coo_tensor(places.T, values, like.shape, check_invariants=False)
    return found.coalesce()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
