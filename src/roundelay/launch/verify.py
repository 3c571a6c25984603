"""`rd.verify`: see that ranks under a strategy train as one device does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, MissingPackageError
from roundelay.launch.local import run

if TYPE_CHECKING:
    import torch

    from roundelay.training.precision import Precision
    from roundelay.training.strategies.ddp import Ddp
    from roundelay.training.strategies.parameter_server import ParameterServer
    from roundelay.training.strategies.zero import Zero
    from roundelay.training.verify import Loss, MakeOptimizer, Verdict

__all__ = ["verify"]


def verify(
    make_model: Callable[[], torch.nn.Module],
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    loss: Loss | None = None,
    strategy: str | Ddp | ParameterServer | Zero = "ddp",
    precision: str | Precision = "fp32",
    ranks: int = 2,
    engine: str = "threads",
    clip: float | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Train one device on the whole batches beside `ranks` ranks; tell where they first differ.

    `make_optimizer` gets the parameters. `loss(model, *batch)` is the mean over the rows of a
    batch; without it `model(*batch)` is. Rows need not divide by the ranks.
    """
    if find_spec("torch") is None:
        raise MissingPackageError("rd.verify", "torch")
    from roundelay.training.prepare import strategy_of  # noqa: PLC0415 - torch, only when asked for
    from roundelay.training.verify import (  # noqa: PLC0415 - likewise
        Difference,
        judge,
        rounding,
        verify_on,
    )

    if not strategy_of(strategy).synchronous:
        raise InvalidArgumentError(
            f"verify compares step by step, and {strategy!r} is not synchronous: its steps depend "
            f"on timing. Compare its loss curve instead."
        )
    if not batches:
        raise InvalidArgumentError("verify needs at least one batch.")
    model = make_model()  # once: ranks that are threads share torch's random numbers

    def be_rank(comm: Communicator) -> list[tuple[Any, ...]]:
        steps = verify_on(
            comm,
            model,
            make_optimizer,
            batches,
            loss=loss or (lambda model, *batch: model(*batch)),
            strategy=strategy,
            precision=precision,
            clip=clip,
        )
        return [astuple(difference) for step in steps for difference in step]

    results = [result for result in run(be_rank, ranks, engine) if result is not None]
    return judge(
        (Difference(*fields) for result in results for fields in result),
        strategy=strategy if isinstance(strategy, str) else repr(strategy),
        ranks=ranks,
        steps=len(batches),
        tolerance=rounding(model, precision) if tolerance is None else tolerance,
    )
