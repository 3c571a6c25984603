"""A prepared model that is pickled: a plain model like a copy of it, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402

nn = torch.nn
STRATEGIES: dict[str, Any] = {
    **{name: name for name in ("ddp", "zero1", "zero2", "zero3", "ps", "ps-async")},
    "zero3, kept": rd.Zero(3, reshard_after_forward=False),
    "ps by servers": rd.ParameterServer(update="server"),
}

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    START = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 2)))
ROWS = torch.linspace(-1, 1, 12).view(4, 3)


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def check_plain(model: Any, expected: dict[str, Any], out: Any) -> None:
    """See that a copy has the weights, computes, trains alone, and goes on being copied."""
    for name, one in model.state_dict().items():
        assert torch.equal(one, expected[name].to(one.dtype)), name
    model.eval()
    assert torch.equal(model(ROWS), out)
    model.train()
    before = model[0].weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    model(ROWS).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(saved(copy.deepcopy(model))[0].weight, model[0].weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_pickled_is_a_plain_model(name: str, size: int, precision: str) -> None:
    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(START)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(
            model, optimizer, comm=comm, strategy=STRATEGIES[name], precision=precision
        )
        model(ROWS).float().square().mean().backward()
        optimizer.step()
        expected = rd.full_state_dict(model)
        model.eval()
        with torch.no_grad():
            out = model(ROWS)
        model.train()
        with rd.whole(model):
            copies = [saved(model), saved(copy.deepcopy(model))]
        if "zero3" not in name or size == 1:
            copies += [saved(model), copy.deepcopy(model)]
        else:
            for part in (model, model[0], model[2]):
                with pytest.raises(InvalidArgumentError, match=r"weight.*rd\.whole"):
                    saved(part)
        for one in copies:
            check_plain(one, expected, out)
        optimizer.zero_grad()
        model(ROWS).float().square().mean().backward()  # and the model itself goes on
        optimizer.step()

    rd.run(be_rank, size, "threads")
