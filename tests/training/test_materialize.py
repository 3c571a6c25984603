"""What is made later is what would have been made at once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402

nn = torch.nn

NAMES = ["zero1", "zero2", "zero3"]


# ---- building later


class Made(nn.Module):  # type: ignore[misc, name-defined]
    """Many ways to be initialised, some of which draw until they are content."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Conv2d(3, 4, 3), nn.GRU(4, 5)])
        self.table = nn.Embedding(11, 7, padding_idx=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(6)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(99)))
        self.seen = nn.Parameter(torch.randn(4, 3) * 0.5 + torch.arange(3))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        nn.init.orthogonal_(self.layers[0].weight)
        generator = torch.Generator().manual_seed(5)
        nn.init.normal_(self.layers[1].bias, generator=generator)
        self.apply(self.change)
        self.tied = self.table.weight
        with torch.no_grad():
            self.layers[0].weight[2].mul_(3).add_(self.layers[0].bias)
        self.half_of_it = nn.Linear(4, 4).half()
        self.made_of_another = nn.Parameter(self.cut.detach().clone() * 2)

    def change(self, module: Any) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def test_what_is_made_later_is_what_would_have_been_made() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = Made()
        after = torch.randn(3)
        torch.manual_seed(3)
        with rd.materialize_later():
            model = Made()
        assert torch.equal(torch.randn(3), after)  # as many random numbers were drawn
        assert all(one.untyped_storage().nbytes() <= 4 for one in model.parameters())
        with pytest.raises(InvalidArgumentError, match=r"rd\.materialize"):
            model.cut.sum()
        before = torch.get_rng_state()
        rd.materialize(model)
        assert torch.equal(torch.get_rng_state(), before)
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, one in expected.state_dict().items():
        assert torch.equal(state[name], one), name
    assert model.tied is model.table.weight


@pytest.mark.parametrize("name", ["ddp", *NAMES])
def test_models_that_are_made_later_train_alike(stacks: Any, name: str) -> None:
    model = stacks.make(stacks.Stack)

    def be_rank(comm: Any) -> dict[str, Any]:
        for rank in range(comm.size):  # ranks that are threads have one source of random numbers
            if rank == comm.rank:
                torch.manual_seed(5 if rank == 0 else 17)
                with rd.materialize_later():
                    mine = stacks.Stack()
            comm.barrier()
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=name, comm=comm)
        for step in range(3):
            stacks.loss_on(comm, mine, step).backward()
            own.step()
            own.zero_grad()
        return {key: one.detach().clone().numpy() for key, one in rd.full_state_dict(mine).items()}

    with torch.random.fork_rng(devices=[]):
        found = rd.run(be_rank, 3, "threads")
    stacks.assert_same(found, stacks.trained("ddp", 3, model))
