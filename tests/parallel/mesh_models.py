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
        if self.training:
            self.seen += 1
        return self.end(self.contract(*self.expand(self.begin(x))))

    def begin(self, x: Any) -> Any:
        cp, ep = map(self.axis, ("cp", "ep"))
        x = self.embed(x)
        everywhere = x if cp is None else functions.all_gather(x, cp, 1)
        x = self.norm(x + torch.tanh(everywhere).mean(1, keepdim=True)) + self.frozen(x)
        return x if self.experts is None else x + self.moe(x, ep)

    def expand(self, x: Any) -> Any:
        tp = self.axis("tp")
        return x, torch.tanh(self.up(x if tp is None else functions.copy(x, tp)))

    def contract(self, x: Any, hidden: Any) -> Any:
        tp = self.axis("tp")
        y = nn.functional.linear(hidden, self.down.weight)
        return x + (y if tp is None else functions.reduce(y, tp)) + self.down.bias

    def end(self, x: Any) -> Any:
        return x @ self.embed.weight  # tied

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


PARTS = ({"embed", "norm", "frozen", "experts", "seen"}, {"up"}, {"down"}, {"embed"})


class Stage(Net):
    """Some of the four parts of a net, in a pipeline."""

    def __init__(self, net: Any, parts: list[int], micro_batches: int) -> None:
        nn.Module.__init__(self)
        self.parts, self.micro_batches = parts, micro_batches
        self.mesh, self.experts = net.mesh, None
        for name in set().union(*(PARTS[part] for part in parts)):
            if name == "seen":
                self.register_buffer("seen", net.seen)
            else:
                setattr(self, name, getattr(net, name))

    def forward(self, *x: Any) -> Any:
        if 0 in self.parts and self.training:
            self.seen += 1 / self.micro_batches
        steps = (self.begin, self.expand, self.contract, self.end)
        for part in self.parts:
            out = steps[part](*x)
            x = out if isinstance(out, tuple) else (out,)
        return x if len(x) > 1 else x[0]


def in_stages(net: Any, mesh: Any) -> Any:
    """A net as a pipeline of up to four stages."""
    rows, stages = ROWS // mesh.size("dp", "ep"), mesh.size("pp")
    micro_batches = 2 if rows % 3 else 3
    cuts = functions.counts_of(len(PARTS), stages)
    starts = [sum(cuts[:stage]) for stage in range(stages)]

    def split(whole: Any) -> Any:
        return [Stage(whole, [*range(start, start + count)], micro_batches)
                for start, count in zip(starts, cuts, strict=True)]  # fmt: skip

    return rd.Pipeline(net, comm=mesh["pp"], loss=cross_entropy, split=split,
                       micro_batches=micro_batches)  # fmt: skip


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


def cross_entropy(output: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return cross_entropy(net(x), y)


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
    mine = in_stages(mine, mesh) if "pp" in mesh else mine
    return mesh, *rd.prepare(mine, adam(mine.parameters()), mesh=mesh, strategy=strategy, **options)


def train(mesh: Any, net: Any, optimizer: Any, data: Any, clip: float = 0.1) -> list[float]:
    norms = []
    for x, y in data:
        if "pp" in mesh:
            net.step(my_share(mesh, x), my_share(mesh, y))
        else:
            optimizer.scale(loss_of(net, my_share(mesh, x), my_share(mesh, y))).backward()
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
