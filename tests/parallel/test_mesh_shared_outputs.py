"""What cut layers give all ranks gets the same gradient on each, or the step is refused on all.

Behind it gradients add up over ranks, so that where no whole parameter comes after it, none tells.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

nn, F = torch.nn, torch.nn.functional
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")
CUT = {"norm": "norm", "up": "column", "down": "row"}
#: How a model ends: the words of its last layers, and of the first one.
ENDS: dict[str, dict[str, str]] = {
    "gathered": {"wide": "replicate", "head": "column gather"},
    "summed": {"wide": "column", "head": "row"},
    "cut": {"wide": "replicate", "head": "column"},
    "gathered sequence": {"begin": "split", "wide": "norm", "head": "column gather"},
}
#: What is another on one rank in some step; the first must be let through.
WAYS = ("nothing", "targets", "left out", "weight of the loss", "swapped targets")
APART = 2  # the step


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """Nothing comes behind the last cut layer, which has no parameter that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.norm, self.up = nn.Identity(), nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 6, bias=False)
        self.wide = nn.Linear(8, 8, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.begin(x)
        return self.head(self.wide(x + self.down(torch.relu(self.up(self.norm(x))))))


class Trained:
    """A model on its ranks, with rows and targets that all of tp have alike."""

    def __init__(self, comm: rd.Communicator, strategy: str, end: str) -> None:
        self.mesh = rd.Mesh(dp=comm.size // 2, tp=2, comm=comm)
        self.model: Any = Model()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.model, self.optimizer = rd.prepare(
            self.model, self.optimizer, mesh=self.mesh, plan=CUT | ENDS[end],
            strategy=strategy, sequence_parallel="begin" in ENDS[end],
        )  # fmt: skip
        self.rows = torch.Generator().manual_seed(self.mesh.place["dp"])
        self.cut = end == "cut"

    def step(self, way: str, *, apart: bool) -> None:
        """Take a step of two micro-batches."""
        pairs = [self.batch() for _ in range(2)]
        targets = [target for _, target in pairs]
        weight = 1.0
        if apart and self.mesh.place["tp"]:
            if way == "targets":
                targets[1] = (targets[1] + 1) % 6
            elif way == "left out":
                targets[0] = targets[0].masked_fill(torch.arange(16) % 3 == 0, -100)
            elif way == "weight of the loss":
                weight = 3.0
            elif way == "swapped targets":
                targets.reverse()
        (first, _), (second, _) = pairs
        with rd.accumulate(self.model):
            (self.loss(first, targets[0]) * weight).backward()
        self.loss(second, targets[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def batch(self) -> tuple[Any, Any]:
        x = torch.randn(4, 4, 8, generator=self.rows)
        return x, torch.randint(6, (16,), generator=self.rows)

    def loss(self, x: Any, target: Any) -> Any:
        logits = self.model(x).flatten(0, 1)
        if self.cut:
            return rd.cross_entropy(logits, target, self.mesh["tp"])
        return F.cross_entropy(logits, target)


def refused_in(comm: rd.Communicator, strategy: str, end: str, way: str) -> int | None:
    """Train; return the step that was refused."""
    trained = Trained(comm, strategy, end)
    for step in range(4):
        try:
            comm.barrier()  # else who is behind may hear of it a step earlier
            trained.step(way, apart=step == APART)
        except CollectiveMismatch as error:
            # Of targets rd.cross_entropy tells by itself, in the forward pass.
            own = end == "cut" and way != "weight of the loss"
            assert own or "The gradient of what comes out of " in str(error)
            return step
    return None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_losses_of_their_own_are_told(
    way: str, end: str, size: int, sample: Any
) -> None:
    for (strategy,) in sample.cells(product(STRATEGIES), 5):
        found = rd.run(lambda comm, one=strategy: refused_in(comm, one, end, way), size, "threads")
        assert set(found) == {None if way == "nothing" else APART}, strategy


@pytest.mark.parametrize("late", [8, 13, 16, 21])
def test_later_ones_are_told_in_every_eighth_pass(late: int) -> None:
    """Those of the passes between are not; ranks go on with what is the mean of their losses."""

    def body(comm: rd.Communicator) -> int | None:
        trained = Trained(comm, "ddp", "gathered")
        for step in range(32):
            try:
                trained.step("targets", apart=step >= late)
            except CollectiveMismatch:
                return step
        return None

    assert set(rd.run(body, 2, "threads")) == {-(-late // 8) * 8}


def test_a_refused_step_can_be_repeated() -> None:
    """What was noted of it is forgotten: the next one is judged by itself."""

    def body(comm: rd.Communicator) -> list[bool]:
        trained = Trained(comm, "ddp", "gathered")
        right = []
        for apart in (False, True, False, True, False):
            try:
                trained.step("targets", apart=apart)
                right.append(True)
            except CollectiveMismatch:
                trained.optimizer.zero_grad()
                right.append(False)
        return right

    assert rd.run(body, 2, "threads") == [[True, False, True, False, True]] * 2


def test_two_models_of_the_same_ranks_are_each_looked_at() -> None:
    def body(comm: rd.Communicator) -> list[str]:
        first, second = (Trained(comm, "ddp", "gathered") for _ in range(2))
        told = []
        for one, apart in ((first, False), (second, False), (first, True), (second, False)):
            try:
                one.step("targets", apart=apart)
                told.append("right")
            except CollectiveMismatch:
                told.append("refused")
        return told

    assert rd.run(body, 2, "threads") == [["right", "right", "refused", "right"]] * 2


def test_many_gradients_at_once_are_let_through() -> None:
    """They are no gradients of a step: nothing is noted of them, and nothing is in their way."""

    def body(comm: rd.Communicator) -> None:
        trained = Trained(comm, "ddp", "summed")
        out, weight = trained.model(torch.ones(1, 4, 8)).flatten(), trained.model.head.weight
        each = [torch.autograd.grad(one, weight, retain_graph=True)[0] for one in out]
        every = torch.autograd.grad(out, weight, torch.eye(len(out)), is_grads_batched=True)[0]
        torch.testing.assert_close(rd.local(every), torch.stack([rd.local(one) for one in each]))
        trained.step("nothing", apart=False)

    rd.run(body, 2, "threads")
