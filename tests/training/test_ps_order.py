"""What asynchronous training gives whatever the order of updates, on two and three workers.

Plain SGD on a loss that is linear in the parameters has gradients that do not depend on them, and
whole numbers, halves and so on add up exactly in float64: the end is the start less the sum of all
that was pushed, to the bit, whoever came first. One update lost, doubled, torn or given to another
parameter would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.planning.clock import staleness_bound  # noqa: E402
from zoo.architectures import Deep, Experts, Lora, Odd, Speech, Unet, resnet  # noqa: E402
from zoo.habits import made  # noqa: E402
from zoo.transformers import Gpt  # noqa: E402

nn = torch.nn
PS = rd.ParameterServer
STEPS, LR, GRAIN = 5, 2.0**-4, 2.0**-10

#: Of every architecture the parameters: shared, frozen, empty, unused ones among them.
ANY: dict[str, Callable[[], Any]] = {
    "GPT, tied": Gpt,
    "ResNet": lambda: resnet(lambda: nn.GroupNorm(2, 4)),
    "LSTM": lambda: Speech(nn.LSTM),
    "LoRA": lambda: nn.Sequential(Lora(), nn.Linear(4, 1)),
    "experts": lambda: Experts("gate"),
    "stochastic depth": Deep,
    "odd": Odd,
    "U-Net": Unet,
}

#: Models whose output is linear in the parameters, called as they are, with what they are given.
LINEAR: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda draw: (draw(2, 4),)),
    "convolution": (lambda: nn.Conv1d(2, 3, 2), lambda draw: (draw(1, 2, 5),)),
    "embedding": (lambda: nn.Embedding(7, 3), lambda draw: (draw(5).abs().long() % 7,)),
    "bilinear": (lambda: nn.Bilinear(2, 3, 2), lambda draw: (draw(2, 2), draw(2, 3))),
}


def drawing(rank: int, step: int) -> Callable[..., Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)

    def draw(*shape: int) -> Any:
        return torch.randint(-8, 9, shape, generator=generator).double()

    return draw


def built(name: str) -> Any:
    """The model with weights that are whole multiples of a power of two."""
    model = made(ANY[name] if name in ANY else LINEAR[name][0])
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.div(GRAIN).round() * GRAIN)
    return model


def loss(name: str, model: Any, rank: int, step: int) -> Any:
    """Linear in the parameters; of a whole architecture, some of them each time."""
    draw = drawing(rank, step)
    if name in LINEAR:
        out = model(*LINEAR[name][1](draw))
        return (out * draw(*out.shape)).sum()
    trained = [one for one in model.parameters() if one.requires_grad]
    return sum((one * draw(*one.shape)).sum()
               for at, one in enumerate(trained) if (at + rank + step) % 3)  # fmt: skip


def expected(name: str, size: int) -> dict[str, Any]:
    """What one device makes of all pushes, in the order of the ranks."""
    model = built(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rank in range(size):
        for step in range(STEPS + rank):
            loss(name, model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: one.clone() for key, one in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        PS(mode="async", servers=2),
        PS(mode="ssp", staleness=0, servers=2),
        PS(mode="ssp", staleness=1),
    ],
    ids=lambda one: f"{one.mode} {one.staleness} {one.servers}",
)
def test_every_order_of_updates_comes_to_the_same(strategy: Any, size: int) -> None:
    names = [*ANY, *LINEAR]

    def be_rank(comm: Any, name: str) -> Any:
        model = built(name)
        own = torch.optim.SGD(model.parameters(), lr=LR)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        for step in range(STEPS + comm.rank):
            loss(name, model, comm.rank, step).backward()
            own.step()
            own.zero_grad()
        state = {key: one.clone() for key, one in rd.full_state_dict(model).items()}
        return state, own.run.state.applied(), rd.staleness(model).most

    def every(comm: Any) -> list[Any]:
        return [be_rank(comm, name) for name in names]

    pushed = [STEPS + rank for rank in range(size)]
    for found in rd.run(every, size, "threads"):
        for name, (state, counted, most) in zip(names, found, strict=True):
            right = expected(name, size)
            assert state.keys() == right.keys()
            for key, one in right.items():
                assert torch.equal(state[key], one), (name, key)
            assert counted == [pushed] * len(strategy.places(size)[0]), name
            if strategy.bound is not None:
                assert most <= staleness_bound(size, strategy.bound), name
