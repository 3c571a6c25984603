"""A small model that is divided by hand along any axes of a mesh, and how it trains."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel import functions  # noqa: E402 - only with torch
from roundelay.parallel.sharding import Sharding, shard_parameter  # noqa: E402

nn = torch.nn

WIDTH, HIDDEN, EXPERTS, SEQUENCE, ROWS, CLASSES = 6, 12, 4, 4, 12, 5
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")
_building = threading.Lock()


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """Mixes positions, then a layer of experts, then one that tp divides; a tied matrix as well."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(CLASSES, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        drawn = torch.randn(EXPERTS, WIDTH, WIDTH) / 3
        self.experts: Any = nn.Parameter(drawn) if experts else None
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.mesh: Any = None

    def axis(self, name: str) -> Any:
        return self.mesh[name] if self.mesh is not None and name in self.mesh else None

    def forward(self, x: Any) -> Any:
        tp, cp, ep = map(self.axis, ("tp", "cp", "ep"))
        if self.training:
            self.seen += 1
        x = self.embed(x)
        everywhere = x if cp is None else functions.all_gather(x, cp, 1)
        x = self.norm(x + torch.tanh(everywhere).mean(1, keepdim=True)) + self.frozen(x)
        if self.experts is not None:
            x = x + self.moe(x, ep)
        inside = x if tp is None else functions.copy(x, tp)
        y = nn.functional.linear(torch.tanh(self.up(inside)), self.down.weight)
        y = y if tp is None else functions.reduce(y, tp)
        return (x + y + self.down.bias) @ self.embed.weight  # tied

    def moe(self, x: Any, ep: Any) -> Any:
        """Every position goes to the expert of its strongest feature, on whatever rank that is."""
        every = x if ep is None else functions.all_gather(x, ep, 0)
        count = len(self.experts)
        first = 0 if ep is None else ep.rank * count
        chosen = every.detach().argmax(-1) % EXPERTS
        total = torch.zeros_like(every)
        for number in range(count):
            mine = (chosen == first + number).unsqueeze(-1)
            total = total + torch.where(mine, every @ self.experts[number], torch.zeros(()))
        return total if ep is None else functions.reduce_scatter(total, ep, 0)


def make_net(*, experts: bool = False) -> Any:
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Net(experts=experts).double()


def even(axis: str, comm: Any, dim: int, length: int) -> Any:
    """The dim in equal pieces, or one more for the first ranks."""
    counts = functions.counts_of(length, comm.size)
    starts = [sum(counts[:rank]) for rank in range(comm.size)]
    pieces = tuple(((at, at + count),) for at, count in zip(starts, counts, strict=True))
    return Sharding(axis, comm, dim, pieces)


def fused(axis: str, comm: Any, dim: int, length: int) -> Any:
    """Each rank has a piece of either half, as of a fused projection."""
    half = even(axis, comm, dim, length // 2).pieces
    shifted = tuple((one[0], (one[0][0] + length // 2, one[0][1] + length // 2)) for one in half)
    return Sharding(axis, comm, dim, shifted)


def divide(net: Any, mesh: Any) -> Any:
    """Divide by hand what a plan would."""
    net.mesh = mesh
    if "tp" in mesh:
        tp = mesh["tp"]
        for parameter, dim in ((net.up.weight, 0), (net.up.bias, 0), (net.down.weight, 1)):
            shard_parameter(parameter, fused("tp", tp, dim, HIDDEN))
    if "ep" in mesh and net.experts is not None:
        shard_parameter(net.experts, even("ep", mesh["ep"], 0, EXPERTS))
    return net


def make_data(steps: int = 3) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(ROWS, SEQUENCE, CLASSES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (ROWS, SEQUENCE), generator=generator),
        )
        for _ in range(steps)
    ]


def my_share(mesh: Any, tensor: Any) -> Any:
    """This rank's rows, and its part of the sequence."""
    rows = [mesh.place[name] for name in mesh.axes if name in ("dp", "ep")]
    sizes = [mesh.axes[name] for name in mesh.axes if name in ("dp", "ep")]
    number = 0
    for place, size in zip(rows, sizes, strict=True):
        number = number * size + place
    tensor = tensor.tensor_split(mesh.size("dp", "ep"))[number]
    return tensor.tensor_split(mesh.size("cp"), 1)[mesh.place.get("cp", 0)]


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def one_device(net: Any, steps: int = 3, clip: float = 0.1) -> tuple[Any, Any, list[float]]:
    """Train a copy alone; return it, its optimizer and what norms its gradients had."""
    alone = copy.deepcopy(net)
    optimizer = adam(alone.parameters())
    norms = []
    for x, y in make_data(steps):
        loss_of(alone, x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return alone, optimizer, norms


def prepare_on(comm: Any, axes: dict[str, int], net: Any, strategy: Any, **options: Any) -> Any:
    mesh = rd.Mesh(comm=comm, **axes)
    mine = divide(copy.deepcopy(net), mesh)
    return mesh, *rd.prepare(mine, adam(mine.parameters()), mesh=mesh, strategy=strategy, **options)


def train(mesh: Any, net: Any, optimizer: Any, data: Any, clip: float = 0.1) -> list[float]:
    norms = []
    for x, y in data:
        loss = loss_of(net, my_share(mesh, x), my_share(mesh, y))
        optimizer.scale(loss).backward()
        norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def shown(axes: dict[str, int]) -> str:
    return ",".join(f"{name}={length}" for name, length in axes.items())


def ranks_of(axes: dict[str, int]) -> int:
    count = 1
    for length in axes.values():
        count *= length
    return count


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> bool:
    scale = float(expected.abs().max()) or 1.0
    return float((found.double() - expected.double()).abs().max()) <= tolerance * scale
