"""One rank on a GPU trains as a plain loop does, wherever its state lies.

Needs a GPU; without one everything here is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch

if torch.cuda.device_count() == 0:
    pytest.skip("needs a GPU", allow_module_level=True)

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": rd.Zero(1),
    "zero2": rd.Zero(2),
    "zero2, optimizer": rd.Zero(2, offload="optimizer"),
    "zero3": rd.Zero(3),
    "zero3, optimizer": rd.Zero(3, offload="optimizer"),
    "zero3, parameters": rd.Zero(3, offload="parameters"),
}


def trained(
    stacks: Any, strategy: Any, precision: str = "fp32", path: Path | None = None
) -> dict[str, Any]:
    """Train with clipping, accumulation, an EMA and looks at gradients and state."""

    def be_rank(comm: Any) -> dict[str, Any]:
        model = stacks.make(stacks.Stack, torch.float64 if precision == "fp32" else torch.float32)
        model = model.cuda()
        own: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if strategy is not None:
            model, own = rd.prepare(model, own, strategy=strategy, comm=comm, precision=precision)
        dtype = next(model.parameters()).dtype
        ema = [one.detach().clone() for one in model.parameters()]
        for step in range(4):
            for part in range(2):
                x, y = (one[part::2].to("cuda", dtype) for one in stacks.batch_of(step))
                loss = (model(x).to(y.dtype) - y).square().mean() / 2
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            first = next(model.parameters())
            assert first.grad.device == first.device == own.param_groups[0]["params"][0].device
            assert float((first.grad * first.detach()).abs().sum()) > 0
            own.step()
            own.zero_grad()
            for mine, now in zip(ema, model.parameters(), strict=True):
                mine.lerp_(now.detach(), 0.1)
            kept = own.state[own.param_groups[0]["params"][0]]["exp_avg"]
            assert kept.device == first.device
            if path is not None and step == 1:
                rd.save(path, model, own, wait=False)
        found = model.state_dict() if strategy is None else rd.full_state_dict(model)
        found = {name: one.detach().cpu().clone() for name, one in found.items()}
        wholes = (one.full() if hasattr(one, "full") else one for one in ema)
        return found | {f"ema {number}": one.cpu() for number, one in enumerate(wholes)}

    found: dict[str, Any] = rd.run(be_rank, 1, "threads")[0]
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_a_plain_loop(stacks: Any, name: str) -> None:
    expected = trained(stacks, None)
    for key, one in trained(stacks, STRATEGIES[name]).items():
        assert one.device.type == "cpu"
        assert (one - expected[key]).abs().max() <= 1e-12 * expected[key].abs().max(), key


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "," in name])
def test_mixed_precision_is_the_same_without_offload(stacks: Any, name: str) -> None:
    """But for what the kernels of CPU and GPU round otherwise."""
    plain = trained(stacks, STRATEGIES[name.partition(",")[0]], "bf16")
    for key, one in trained(stacks, STRATEGIES[name], "bf16").items():
        close = (one - plain[key]).abs().max() <= 2**-7 * plain[key].abs().max()
        assert close, key


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_saved_beside_training_is_what_was_there_at_the_call(
    stacks: Any, tmp_path: Path, name: str
) -> None:
    """Training goes on at once, on the same memory; what is read back are the weights of then."""
    pytest.importorskip("safetensors.torch")
    trained(stacks, STRATEGIES[name], path=tmp_path / "beside")

    def be_rank(comm: Any) -> dict[str, Any]:
        model = stacks.make(stacks.Stack, torch.float64).cuda()
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, own = rd.prepare(model, own, strategy=STRATEGIES[name], comm=comm)
        rd.load(tmp_path / "beside", model, own)
        for step in range(2, 4):
            for part in range(2):
                x, y = (one[part::2].to("cuda", torch.float64) for one in stacks.batch_of(step))
                ((model(x) - y).square().mean() / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
            own.zero_grad()
        return {key: one.detach().cpu().clone() for key, one in rd.full_state_dict(model).items()}

    gone_on = trained(stacks, STRATEGIES[name])
    for key, one in rd.run(be_rank, 1, "threads")[0].items():
        assert (one - gone_on[key]).abs().max() <= 1e-12 * gone_on[key].abs().max(), key
