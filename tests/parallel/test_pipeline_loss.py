"""What `step` and `evaluate` return is a loss to be read, as any tensor; backward is refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import ranks_of, shown  # noqa: E402 - only with torch

from roundelay.errors import InvalidArgumentError  # noqa: E402 - likewise

nn = torch.nn
AXES: list[dict[str, int]] = [{"pp": 1}, {"pp": 2}, {"pp": 3}, {"dp": 2, "pp": 2}]
X = torch.ones(4, 4)
WHY = {"step": "has run the backward pass of all micro-batches already",
       "evaluate": "returns a loss without a gradient"}  # fmt: skip
BACKWARD: dict[str, Any] = {
    "its own": lambda loss, _: loss.backward(),
    "with options": lambda loss, _: loss.backward(retain_graph=True),
    "rd": lambda loss, _: rd.backward(loss, weight=4),
    "scaled": lambda loss, optimizer: optimizer.scale(loss).backward(),
}


def pipeline(comm: Any, axes: dict[str, int], precision: str = "fp32") -> Any:
    mesh = rd.Mesh(comm=comm, **axes)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = rd.Pipeline(model, comm=mesh["pp"], micro_batches=2, loss=nn.functional.mse_loss)
    return rd.prepare(pipe, torch.optim.SGD(pipe.parameters()), mesh=mesh, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("how", BACKWARD)
@pytest.mark.parametrize("what", WHY)
@pytest.mark.parametrize("axes", AXES, ids=shown)
def test_backward_is_refused_on_all_ranks(
    axes: dict[str, int], what: str, how: str, precision: str
) -> None:
    """And the step that was run is as it was: the optimizer takes it."""

    def body(comm: Any) -> None:
        pipe, optimizer = pipeline(comm, axes, precision)
        loss = getattr(pipe, what)(X, X)
        with pytest.raises(InvalidArgumentError, match=re.escape(WHY[what])):
            BACKWARD[how](loss, optimizer)
        optimizer.step()

    rd.run(body, ranks_of(axes), "threads")


READ: dict[str, Any] = {
    "item": lambda loss: loss.item(), "float": float, "format": lambda loss: f"{loss:.6f}",
    "repr": repr, "numpy": lambda loss: loss.numpy().item(), "view": lambda loss: loss.view(1),
    "sum": lambda loss: loss + 1.0, "in place": lambda loss: loss.clone().mul_(2),
    "stack": lambda loss: torch.stack([loss, loss]).mean(), "copy": copy.deepcopy,
    "detach": lambda loss: loss.detach(), "compare": lambda loss: bool(loss < 100),
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),
}  # fmt: skip


@pytest.mark.parametrize("what", WHY)
@pytest.mark.parametrize("read", READ)
def test_it_is_read_as_any_tensor(read: str, what: str) -> None:
    """What comes of it is a tensor without a gradient, and no stranger in a file."""

    def body(comm: Any) -> None:
        pipe, _ = pipeline(comm, {"pp": 2})
        loss = getattr(pipe, what)(X, X)
        plain = torch.tensor(loss.item(), dtype=loss.dtype)
        found, wanted = READ[read](loss), READ[read](plain)
        assert type(found) is type(wanted)
        assert bool(found == wanted)
        assert not loss.requires_grad
        file = io.BytesIO()
        torch.save({"loss": loss}, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True)["loss"], plain)
        comm.all_reduce(loss.view(1))
        assert loss.item() == 2 * plain.item()

    rd.run(body, 2, "threads")
