"""Checkpoints for others: read without ranks, as one safetensors file, in torch's own form."""

from __future__ import annotations

import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.cli._group import roundelay  # noqa: E402
from roundelay.errors import (  # noqa: E402
    CheckpointError,
    InvalidArgumentError,
    UnknownNameError,
    UnsendableError,
)
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn
STRATEGIES: dict[str, Any] = {
    **known_strategies(),
    "ps by servers": rd.ParameterServer(update="server", servers=2),
}
SYNCHRONOUS = [name for name, one in STRATEGIES.items() if one.synchronous]


BUILDING = threading.Lock()  # ranks that are threads share torch's random numbers


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Tied, frozen and empty parameters, a scalar, buffers and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.empty = nn.Embedding(0, 4)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: Any) -> Any:
        self.calls += 1
        return self.head(self.frozen(self.norm(self.embed(tokens)))) * self.gain

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def optimizer_of(model: Any) -> Any:
    groups = [
        {"params": [model.embed.weight, model.empty.weight]},
        {"params": [model.gain, *model.norm.parameters()], "lr": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def written(path: Path, name: str = "ddp", ranks: int = 3) -> tuple[dict[str, Any], Any]:
    """Train and save, and return what the ranks have: the model's and the optimizer's state."""

    def be_rank(comm: Any) -> Any:
        with BUILDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = Net()
        model, own = rd.prepare(model, optimizer_of(model), strategy=STRATEGIES[name], comm=comm)
        for _ in range(2):
            model(torch.arange(7)).square().sum().backward()
            own.step()
            own.zero_grad()
        rd.save(path, model, own, extra={"epoch": 3, "ema": torch.ones(2)})
        whole = rd.full_state_dict(model)
        return {
            key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in whole.items()
        }, own.state_dict()

    model, optimizer = rd.run(be_rank, ranks, "threads")[0]
    return model, optimizer


def same(found: Any, expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for key, one in expected.items():
        if isinstance(one, torch.Tensor):
            assert (found[key].dtype, found[key].shape) == (one.dtype, one.shape), key
            assert torch.equal(found[key], one), key
        else:
            assert found[key] == one, key


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_one_process_reads_what_any_ranks_have_written(tmp_path: Path, name: str) -> None:
    expected, state = written(tmp_path / "it", name)
    found = rd.read_checkpoint(tmp_path / "it")
    assert (found.steps, found.ranks) == (2, 3)
    assert found.extra["epoch"] == 3
    whole = found.state_dict()
    same(whole, expected)
    same(found.weights, expected)
    assert whole["head.weight"] is whole["embed.weight"]
    model = Net()
    model.load_state_dict(found.weights)
    assert model.calls == 2
    own = found.optimizers()[0]
    assert own["kind"] == "AdamW"
    assert [group["lr"] for group in own["param_groups"]] == [1e-2, 0.1]
    numbers = {one: at for at, one in enumerate(
        name for group in own["param_groups"] for name in group["params"])}  # fmt: skip
    assert set(own["state"]) >= {"embed.weight", "gain", "norm.weight"}
    for key, table in own["state"].items():
        torch.testing.assert_close(table, state["state"][numbers[key]], rtol=0, atol=0)
    half = rd.read_checkpoint(tmp_path / "it", dtype=torch.bfloat16, check=False).weights
    assert half["gain"].dtype == torch.bfloat16
    assert half["norm.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(half["embed.weight"], expected["embed.weight"].bfloat16())
    assert "nothing" not in half


def test_what_was_opened_stays_while_another_is_saved(tmp_path: Path) -> None:
    expected, _ = written(tmp_path / "it")
    found = rd.read_checkpoint(tmp_path / "it")
    written(tmp_path / "it", "zero1", 2)
    assert found.ranks == 3
    same(found.weights, expected)


def test_what_is_damaged_is_told_before_anything_is_read(tmp_path: Path) -> None:
    written(tmp_path / "it")
    file = max((tmp_path / "it").glob("parts-*/*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        rd.read_checkpoint(tmp_path / "it")
    rd.read_checkpoint(tmp_path / "it", check=False)
    file.unlink()
    for check in (True, False):
        with pytest.raises(CheckpointError, match=file.name):
            rd.read_checkpoint(tmp_path / "it", check=check)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        rd.read_checkpoint(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match="int8"):
        rd.read_checkpoint(tmp_path / "it", dtype=torch.int8)


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_one_safetensors_file_has_every_weight_once(tmp_path: Path, name: str) -> None:
    expected, _ = written(tmp_path / "it", name)
    out = rd.export(tmp_path / "it", tmp_path / "model.safetensors")
    once = {key: one for key, one in expected.items() if key not in ("head.weight", "_extra_state")}
    same(safetensors.load_file(out), once)
    with safetensors.safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = Net()
    missing, unexpected = model.load_state_dict(safetensors.load_file(out), strict=False)
    assert (set(missing), unexpected) == ({"head.weight", "_extra_state"}, [])
    same({key: one for key, one in model.state_dict().items() if key in once}, once)
    rd.export(tmp_path / "it", out, dtype=torch.float16)
    half = {key: one.half() if one.is_floating_point() else one for key, one in once.items()}
    same(safetensors.load_file(out), half)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["it", "model.safetensors"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_torch_loads_its_own_form_without_us(tmp_path: Path, name: str) -> None:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    dcp_state: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")

    expected, state = written(tmp_path / "it", name)
    rd.export(tmp_path / "it", tmp_path / "dcp", form="dcp")
    model = Net()
    own = optimizer_of(model)
    given = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(model, own), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is alone
        dcp.load(
            given,
            storage_reader=dcp.FileSystemReader(tmp_path / "dcp"),
            planner=dcp.DefaultLoadPlanner(allow_partial_load=True),  # what was never used
            no_dist=True,
        )
    dcp_state.set_state_dict(
        model, own, model_state_dict=given["model"], optim_state_dict=given["optimizer"]
    )
    same(model.state_dict(), expected)
    mine = own.state_dict()
    for at, table in state["state"].items():
        torch.testing.assert_close(mine["state"][at], table, rtol=0, atol=0)
    assert [group["lr"] for group in mine["param_groups"]] == [1e-2, 0.1]
    with pytest.raises(InvalidArgumentError, match="needs a new folder"):
        rd.export(tmp_path / "it", tmp_path / "dcp", form="dcp")


def test_the_command_does_the_same(tmp_path: Path) -> None:
    expected, _ = written(tmp_path / "it", ranks=1)
    out = tmp_path / "model.safetensors"
    words = ["export", str(tmp_path / "it"), str(out), "--dtype", "bf16"]
    done = CliRunner().invoke(roundelay, words)
    assert (done.exit_code, done.output) == (0, f"{out}\n")
    assert torch.equal(safetensors.load_file(out)["gain"], expected["gain"].bfloat16())
    done = CliRunner().invoke(roundelay, ["export", str(tmp_path), str(out)])
    assert done.exit_code == 1
    assert "There is no checkpoint at" in done.output
    done = CliRunner().invoke(roundelay, ["export", str(tmp_path / "it"), str(tmp_path / "out")])
    assert done.exit_code == 2


def test_wrong_use_is_named(tmp_path: Path) -> None:
    written(tmp_path / "it", ranks=1)
    with pytest.raises(UnknownNameError, match="safetensors"):
        rd.export(tmp_path / "it", tmp_path / "x.safetensors", form="safetensor")
    with pytest.raises(InvalidArgumentError, match=r"ends in \.safetensors"):
        rd.export(tmp_path / "it", tmp_path / "x")
    with pytest.raises(UnknownNameError, match="bf16"):
        rd.export(tmp_path / "it", tmp_path / "x.safetensors", dtype="bfloat16")
    with pytest.raises(CheckpointError, match="could not be exported"):
        rd.export(tmp_path / "it", tmp_path / "no" / "x.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_extra_takes_what_training_loops_keep(tmp_path: Path, name: str) -> None:
    """State of schedulers, of torch's own scaler, of a moving average; and parts of them."""

    def be_rank(comm: Any) -> None:
        model = nn.Linear(2, 2)
        average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(own, 10)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model, own = rd.prepare(model, own, strategy=STRATEGIES[name], comm=comm)
        extra = {"plan": plan.state_dict(), "scaler": scaler.state_dict(), "best": np.float32(0.5),
                 "average": average.state_dict(), 7: (1, None), "empty": {}}  # fmt: skip
        rd.save(tmp_path / "it", model, own, extra=extra)
        found = rd.load(tmp_path / "it", model, own).extra
        plan.load_state_dict(found["plan"])
        scaler.load_state_dict(found["scaler"])
        average.load_state_dict(found["average"])
        assert found[7] == (1, None)
        assert type(found["average"]) is type(average.state_dict())

    rd.run(be_rank, 2, "threads")


class Turning(nn.Module):  # type: ignore[misc, name-defined]
    """Complex numbers of both widths."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.narrow = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex128))

    def forward(self) -> Any:
        return self.wide.abs().square().sum() + self.narrow.abs().square().sum()


def test_complex_numbers_come_back(tmp_path: Path) -> None:
    """Bit for bit, on other ranks, with the optimizer's state; one safetensors file has no form."""

    def pair(comm: Any) -> Any:
        model = Turning()
        return rd.prepare(model, torch.optim.Adam(model.parameters()), strategy="ddp", comm=comm)

    def write(comm: Any) -> Any:
        model, optimizer = pair(comm)
        model().backward()
        optimizer.step()
        extra = {"turned": model.wide.detach().conj(), "none": torch.empty(0, 3).cdouble()}
        rd.save(tmp_path / "it", model, optimizer, extra=extra)
        return rd.full_state_dict(model), optimizer.state_dict()["state"]

    def read(comm: Any) -> Any:
        model, optimizer = pair(comm)
        found = rd.load(tmp_path / "it", model, optimizer)
        return rd.full_state_dict(model), optimizer.state_dict()["state"], found.extra

    (before, state), *_ = rd.run(write, 3, "threads")
    checkpoint = rd.read_checkpoint(tmp_path / "it")
    for after, again, extra in rd.run(read, 2, "threads"):
        for found in (after, checkpoint.state_dict()):
            assert all(torch.equal(found[name], one) for name, one in before.items())
        for number, kept in state.items():
            assert all(torch.equal(again[number][key], one) for key, one in kept.items())
        assert torch.equal(extra["turned"], before["wide"].conj())
        assert extra["none"].shape == (0, 3)
        assert extra["none"].dtype == torch.complex128
    rd.export(tmp_path / "it", tmp_path / "dcp", form="dcp")
    with pytest.raises(CheckpointError, match=r"wide is of torch.complex128.*form='dcp'"):
        rd.export(tmp_path / "it", tmp_path / "it.safetensors")


@pytest.mark.parametrize("wait", [True, False])
def test_what_has_no_form_is_named(tmp_path: Path, wait: bool) -> None:  # noqa: FBT001
    odd = [torch.zeros(2, dtype=torch.float8_e4m3fnuz), torch.eye(2).to_sparse()]

    def be_rank(comm: Any) -> list[str]:
        told = []
        for one in odd:
            model = nn.Linear(2, 2)
            pair = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
            with pytest.raises((CheckpointError, UnsendableError)) as error:
                rd.save(tmp_path / "it", *pair, extra={"odd": [one]}, wait=wait).wait()
            told.append(str(error.value))
        return told

    for told in rd.run(be_rank, 2, "threads"):
        for text, one in zip(told, odd, strict=True):
            word = str(one.layout if one.is_sparse else one.dtype)
            assert "extra['odd'][0] is" in text
            assert word in text
