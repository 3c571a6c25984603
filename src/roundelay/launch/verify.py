"""`rd.verify`: see that ranks under a strategy train as one device does on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from roundelay.arguments import index_of, shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, MissingPackageError
from roundelay.launch.local import run

if TYPE_CHECKING:
    import torch

    from roundelay.training.precision import Precision
    from roundelay.training.strategies.ddp import Ddp
    from roundelay.training.strategies.parameter_server import ParameterServer
    from roundelay.training.strategies.zero import Zero
    from roundelay.training.verify import Divide, Loss, MakeOptimizer, Plan, Verdict

__all__ = ["verify"]

RANKS = 2  # where nothing else is said


def verify(
    make_model: Callable[[], torch.nn.Module],
    make_optimizer: MakeOptimizer,
    batches: Iterable[Sequence[torch.Tensor]],
    *,
    loss: Loss | None = None,
    strategy: str | Ddp | ParameterServer | Zero = "ddp",
    precision: str | Precision = "fp32",
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    divide: Divide | None = None,
    engine: str = "threads",
    clip: float | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Train one device on the whole batches beside ranks, 2 of them; tell where they first differ.

    `make_optimizer` gets the parameters. `loss(model, *batch)` is the mean over the rows of a
    batch; without it `model(*batch)` is. Rows need not divide by the ranks.

    With `mesh={"dp": 2, "tp": 2}` the ranks stand in a mesh, and a plan divides the model, or
    `divide(model, mesh)` does, on each rank's copy; it may return an `rd.Pipeline` of it, of which
    `step` gets all of a batch but the last as x, and the last as the target. Then also the outputs
    of modules and the gradients are compared, and the first that differs is named. Along cp,
    tensors of a batch are cut in their second dim, the sequence.

    A larger difference than `tolerance` counts: by default 1e-12 in float64 and 1e-5 in float32, of
    a tensor's largest element. Gradients that are rounding beside the largest one of the model, as
    those of key biases in attention, count as nothing, and so do the steps that Adam makes of them.
    With `precision="bf16"` or `"fp16"` one device trains in it, too,
    and 0.03 of a tensor's norm is rounding. What rounding makes of gradients is measured there, by
    a pass more in float32; and all begins anew with a lower loss scale as long as steps are
    skipped.
    """
    if find_spec("torch") is None:
        raise MissingPackageError("rd.verify", "torch")
    from roundelay.training.prepare import strategy_of  # noqa: PLC0415 - torch, only when asked for
    from roundelay.training.verify import (  # noqa: PLC0415 - likewise
        Difference,
        Trial,
        judge,
        rounding,
        verify_on,
    )

    if not strategy_of(strategy).synchronous:
        raise InvalidArgumentError(
            f"verify compares step by step, and {strategy!r} is not synchronous: its steps depend "
            f"on timing. Compare its loss curve instead."
        )
    listed = list(batches)
    if not listed:
        raise InvalidArgumentError("verify needs at least one batch.")
    count = _ranks(ranks, mesh, listed)
    model = make_model()  # once: ranks that are threads share torch's random numbers

    def be_rank(comm: Communicator) -> list[tuple[Any, ...]]:
        trial = Trial(
            model,
            make_optimizer,
            listed,
            loss=loss or (lambda model, *batch: model(*batch)),
            strategy=strategy,
            precision=precision,
            clip=clip,
            axes=mesh,
            plan=plan,
            sequence_parallel=sequence_parallel,
            divide=divide,
        )
        steps = verify_on(comm, trial)
        return [astuple(difference) for step in steps for difference in step]

    results = [result for result in run(be_rank, count, engine) if result is not None]
    return judge(
        (Difference(*fields) for result in results for fields in result),
        strategy=strategy if isinstance(strategy, str) else repr(strategy),
        ranks=count,
        steps=len(listed),
        tolerance=rounding(model, precision) if tolerance is None else tolerance,
    )


def _ranks(
    ranks: int | None, mesh: Mapping[str, int] | None, batches: Sequence[Sequence[torch.Tensor]]
) -> int:
    """Return how many ranks there are, as a mesh says it or the user."""
    if mesh is None:
        return RANKS if ranks is None else ranks
    given: object = mesh
    if not isinstance(given, Mapping) or not all(index_of(length) for length in given.values()):
        raise InvalidArgumentError(
            f"mesh of verify is a dict of axes and their lengths, such as {{'dp': 2, 'tp': 2}}, "
            f"as verify starts the ranks itself; not {shown(mesh)}."
        )
    count = math.prod(mesh.values())
    if ranks not in (None, count):
        raise InvalidArgumentError(
            f"verify got ranks={ranks} and a mesh of {count}. Leave out ranks=."
        )
    pieces = mesh.get("cp", 1)
    for tensor in (tensor for batch in batches for tensor in batch):
        if tensor.dim() > 1 and tensor.size(1) % pieces:
            raise InvalidArgumentError(
                f"verify cuts the second dim of a batch along cp={pieces}, and {tensor.size(1)} "
                f"does not divide by it. Take sequences of another length."
            )
    return count
