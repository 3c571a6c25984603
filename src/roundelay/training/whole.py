"""`rd.whole`: parameters to be read and written as on one device, whatever the strategy."""

from __future__ import annotations

import hashlib
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import torch

from roundelay.errors import CollectiveMismatch, CommunicationError, InvalidArgumentError
from roundelay.training._run import Run, refuse_divided, run_with

__all__ = ["Whole", "fingerprint", "whole"]

APART = "The ranks came to rd.whole by different steps, so that their weights are not the same."
Model = TypeVar("Model", bound=torch.nn.Module)


def whole(module: Model) -> Whole[Model]:
    """Have the parameters of a prepared model, or of a module in it, whole inside a `with` block.

    Every rank enters it, and writes the same. Under zero3 the units that hold the parameters are
    gathered, and each rank keeps its own part of what was written; under other strategies it is
    as if written outside. Ranks that have written different values are told which. The block may
    call the model, but not run backward or step.

    >>> import roundelay as rd
    >>> def be_rank(comm):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model, optimizer = rd.prepare(model, optimizer, strategy="zero3", comm=comm)
    ...     with rd.whole(model), torch.no_grad():
    ...         model.weight.fill_(3.0)
    ...     return rd.full_state_dict(model)["weight"].tolist()
    >>> rd.run(be_rank, 2, engine="threads")
    [[[3.0, 3.0]], [[3.0, 3.0]]]
    """
    return Whole(module)


class Whole(Generic[Model]):
    """A block in which parameters are whole."""

    def __init__(self, module: Model) -> None:
        self._run: Run = run_with("whole", module)
        refuse_divided(self._run, "whole", module)
        self._module = module
        self._mark = 0  # of the step when it was entered
        names = {id(one): name for name, one in self._run.setup.model.named_parameters()}
        #: What the block was entered with, by name.
        self._tensors = {
            names[id(parameter)]: parameter
            for parameter in module.parameters()
            if id(parameter) in names
        }

    def __enter__(self) -> Model:
        """Bring the parameters. All ranks do."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch's own question
            raise InvalidArgumentError(
                "rd.whole was called inside a backward pass, when parameters come and go. Call it "
                "before or after loss.backward()."
            )
        if not self._run.state.sees_whole:  # or what comes would hide what was written
            self._run.grad_hooks.see_edits()
        self._run.state.open(list(self._tensors.values()))
        mark = self._run.mark() or 0
        beside = self._run.step.beside  # where ranks have other parts, not all is the same
        self._mark = int(mark if beside is None else self._run.step.shared_mark)
        self._run.step.opened += 1
        return self._module

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take what was written, on every rank, if that is the same everywhere."""
        run, tensors = self._run, list(self._tensors.values())
        run.step.opened -= 1
        if error is not None and (
            isinstance(error, CommunicationError) or not isinstance(error, Exception)
        ):  # the others may not come
            run.state.shut(tensors, keep=False, written=False)
            return
        different, written = self._compare(tensors)
        run.state.shut(tensors, keep=not different, written=written)
        if different == APART:
            run.compare()
        if different:
            raise CollectiveMismatch(different) from error
        run.grad_hooks.agreed()  # nobody needs to compare it once more
        run.check_still_the_same()

    def _compare(self, tensors: list[torch.nn.Parameter]) -> tuple[str, bool]:
        """Say which parameter the ranks have written differently, and whether any was written."""
        state, comm = self._run.state, self._run.alike
        written = state.written(tensors)
        if comm.size == 1:
            return "", written
        mine = [
            int(written),
            self._mark,
            *(fingerprint(name, tensor) for name, tensor in self._tensors.items()),
        ]
        every = comm.all_gather(np.array(mine, np.int64))
        if len(set(every[:, 1].tolist())) > 1:
            return APART, False
        for number, name in enumerate(self._tensors, 2):
            others = [rank for rank, one in enumerate(every) if one[number] != every[0][number]]
            if others:
                ranks = ", ".join(map(str, others))
                return (
                    f"Inside rd.whole the ranks have left different values in the parameter "
                    f"{name}: rank {ranks} others than rank 0. Write the same on every rank, also "
                    f"where random numbers are drawn."
                ), False
        return "", bool(every[:, 0].any())


@torch.no_grad()
def fingerprint(name: str, tensor: torch.Tensor) -> int:
    """Return a number that two tensors have in common only if they are called and are the same."""
    found = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    if tensor.numel():
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(values.numpy().data)
    return int.from_bytes(found.digest(), "little", signed=True)
