"""A pipeline's state is the whole model's: it goes on, bit for bit, on any mesh and on one rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.parallel.test_mesh_training_checkpoint import same  # noqa: E402 - only with torch
from tests.parallel.test_pipeline import (  # noqa: E402 - likewise
    EXACT,
    Block,
    Words,
    _building,
    built,
    words_batch,
    words_loss,
)
from tests.parallel.test_pipeline_data_parallel import (  # noqa: E402
    CLIP,
    STEPS,
    adam,
    alone,
    prepared,
    train,
)

from roundelay.errors import InvalidArgumentError  # noqa: E402 - only with torch

nn = torch.nn
CHAIN: list[tuple[dict[str, int], str]] = [
    ({"pp": 2, "dp": 2}, "zero1"), ({"dp": 1}, "ddp"), ({"dp": 3}, "zero3"), ({"pp": 4}, "zero2"),
    ({"dp": 2, "pp": 3}, "ps"),
]  # fmt: skip


class Unlike(nn.Module):  # type: ignore[misc, name-defined]
    """The head is named first, whose weight the embedding shares; and more is there than used."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 11, bias=False)
        self.blocks = nn.ModuleList(Block(5) for _ in range(4))
        self.old = nn.Linear(2, 2).requires_grad_(requires_grad=False)
        self.register_buffer("numbers", torch.arange(3.0))
        self.tokens = nn.Embedding(11, 5)
        self.tokens.weight = self.head.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ready(comm: Any, model: Any, axes: dict[str, int], strategy: str) -> Any:
    if "pp" in axes:
        return prepared(comm, model, axes, strategy=strategy, micro_batches=4)
    mesh = rd.Mesh(comm=comm, **axes)
    with _building:
        mine = copy.deepcopy(model)
    return mesh, *rd.prepare(mine, adam(mine.parameters()), mesh=mesh, strategy=strategy)


def go_on(mesh: Any, model: Any, optimizer: Any, batch: Any) -> None:
    if isinstance(model, rd.Pipeline):
        train(mesh, model, optimizer, batch)
        return
    rows = [part.tensor_split(mesh.size("dp"))[mesh.place["dp"]] for part in batch]
    for _ in range(STEPS):
        optimizer.zero_grad()
        words_loss(model(rows[0]), rows[1]).backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()


@pytest.mark.parametrize("make", [Words, Unlike])
def test_a_checkpoint_goes_from_mesh_to_mesh(make: Any, tmp_path: Path) -> None:
    model, batch = built(make), words_batch(24)
    before: Any = None
    for axes, strategy in CHAIN:

        def body(comm: Any, axes: Any = axes, strategy: str = strategy, old: Any = before) -> Any:
            mesh, mine, optimizer = ready(comm, model, axes, strategy)
            if old is not None:
                rd.load(tmp_path / "at", mine, optimizer)
                found = rd.full_state_dict(mine), optimizer.state_dict()
                assert same(found, old)
                assert same(dict(rd.whole_tensors(mine)), old[0])
            go_on(mesh, mine, optimizer, batch)
            rd.save(tmp_path / "at", mine, optimizer)
            found = rd.full_state_dict(mine), optimizer.state_dict()
            return copy.deepcopy(found)

        size = int(torch.tensor([*axes.values()]).prod())
        every = rd.run(body, size, "threads")
        assert all(same(found, every[0]) for found in every)
        before = every[0]
        assert same(dict(rd.read_checkpoint(tmp_path / "at").state_dict()), before[0])
    *_, whole, optimizer = alone(model, batch, STEPS * len(CHAIN))
    for name, value in whole.state_dict().items():
        assert float((before[0][name] - value).abs().max()) <= EXACT, name
    optimizer.load_state_dict(before[1])  # as its own
    assert same(optimizer.state_dict(), before[1])


def test_groups_in_another_order_are_refused() -> None:
    """An optimizer's state has numbers, which say nothing where the model's order is not kept."""
    model = built(Words)

    def body(comm: Any) -> str:
        mesh = rd.Mesh(pp=2, comm=comm)
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss)
        own = adam([*pipe.parameters()][:: -1 if comm.rank else 1])
        pipe, optimizer = rd.prepare(pipe, own, mesh=mesh)
        with pytest.raises(InvalidArgumentError) as caught:
            optimizer.state_dict()
        return str(caught.value)

    assert all("in the order of the model" in told for told in rd.run(body, 2, "threads"))


def test_load_state_dict_takes_the_whole_model() -> None:
    """Each stage keeps what it has of it; what no stage has is refused as ever."""

    def body(comm: rd.Communicator) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        pipe = rd.Pipeline(model, comm=comm, micro_batches=1, loss=torch.nn.functional.mse_loss)
        whole = {f"{at}.{name}": torch.full((4, 4) if name == "weight" else (4,), float(at))
                 for at in range(4) for name in ("weight", "bias")}  # fmt: skip
        pipe.load_state_dict(whole)
        assert all(bool((one == whole[name]).all()) for name, one in pipe.named_parameters())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
            pipe.load_state_dict(whole | {"other": torch.zeros(1)})

    rd.run(body, 2, "threads")
