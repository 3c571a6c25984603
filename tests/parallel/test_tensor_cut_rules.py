"""What lies between cut layers is right, or refused on all ranks: functions, and shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.parallel.conftest import outcome_of

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")


nn, F = torch.nn, torch.nn.functional
ROWS, TOKENS, WIDTH, DIM = 2, 4, 12, 2
X = torch.linspace(-1, 1, ROWS * TOKENS * WIDTH).view(ROWS, TOKENS, WIDTH).double().sin()
Outcome = tuple[str, list[Any]]


def heads(x: Any) -> Any:
    return x.unflatten(-1, (-1, DIM)).transpose(1, 2)


def features(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def written(x: Any) -> Any:
    new = torch.zeros(x.shape, dtype=x.dtype)
    new[:] = x
    return new.softmax(-1)


def added(x: Any) -> Any:
    new = torch.zeros(x.shape, dtype=x.dtype)
    new += x
    return new.softmax(-1)


def gated(x: Any) -> Any:
    one, other = x.unflatten(-1, (2, -1)).unbind(-2)
    return (one * other).repeat(1, 1, 2)


def einsum_attention(x: Any) -> Any:
    q = x.unflatten(-1, (-1, DIM))
    scores = torch.einsum("bthd,bshd->bhts", q, q).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", scores, q).flatten(2)


#: Functions that are right between cut layers, and must be taken.
RIGHT: dict[str, Any] = {
    "pointwise": lambda x: torch.special.entr(torch.sinc(x).sigmoid()).hypot(x.atan2(x + 2)),
    "einsum attention": einsum_attention,
    "einsum of dots": lambda x: torch.einsum("...h->...h", x).relu(),
    "product by heads": lambda x: features((heads(x) @ heads(x).mT).softmax(-1) @ heads(x)),
    "causal product": lambda x: torch.ones(TOKENS, TOKENS).double().tril() @ x,
    "tokens by tensordot": lambda x: torch.tensordot(torch.ones(3, ROWS).double(), x, 1)[:2],
    "mask": lambda x: features(heads(x).masked_fill(torch.ones(1, 1, TOKENS, 1) > 0, 1.0)),
    "padded tokens": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "roll by name": lambda x: x.roll(1, dims=1) + x.flip(dims=(1,)),
    "repeated rows": lambda x: x.repeat(1, 2, 1)[:, :TOKENS],
    "index": lambda x: features(heads(x)[:, :, torch.tensor([1, 0, 3, 2])]),
    "heads twice": lambda x: features(
        heads(x).repeat_interleave(2, 1).unflatten(1, (-1, 2)).sum(2)
    ),
    "expand": lambda x: features(
        heads(x)[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2).unflatten(1, (-1, 3)).mean(2)
    ),
    "batch_norm": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x),
    "loop over heads": lambda x: torch.stack([h / h.sum() for h in heads(x).unbind(1)], 2).flatten(
        2
    ),
    "tril of heads": lambda x: features((heads(x) @ heads(x).mT).tril() @ heads(x)),
    "rows and heads": lambda x: (
        heads(x).flatten(0, 1).softmax(-1).unflatten(0, (ROWS, -1)).transpose(1, 2).flatten(2)
    ),
    "new": lambda x: x + x.new_ones(1),
}
#: Functions that would be those of this rank's part.
WRONG: dict[str, Any] = {
    "one head": lambda x: (x @ x.mT).softmax(-1) @ x,
    "mm": lambda x: (x[0].mm(x[0].t()) @ x[0]).expand_as(x),
    "linear": lambda x: F.linear(x, torch.ones(3, x.shape[-1]).double()).sum(-1, keepdim=True) * x,
    "inner": lambda x: torch.inner(x, x).sum() * x,
    "tensordot": lambda x: torch.tensordot(x, x, 3) * x,
    "einsum": lambda x: torch.einsum("bth,bsh->bts", x, x) @ x,
    "einsum and softmax": lambda x: torch.einsum("bth->hbt", x).softmax(0).movedim(0, -1),
    "bmm": lambda x: torch.bmm(x, torch.ones(ROWS, x.shape[-1], 1).double()) * x,
    "group_norm": lambda x: F.group_norm(x.mT, 2).mT,
    "instance_norm": F.instance_norm,
    "pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "conv": lambda x: F.conv1d(x.flatten(0, 1)[:, None], torch.ones(1, 1, 3).double(), padding=1)
    .view_as(x),
    "pad": lambda x: F.pad(x, (1, 0))[..., :-1],
    "fliplr": lambda x: x.mT.fliplr().mT.mT.fliplr().mT + x[0].fliplr(),
    "rot90": lambda x: torch.rot90(x, 2, (1, 2)),
    "triu": torch.triu,
    "channel_shuffle": lambda x: F.channel_shuffle(x.mT[..., None], 2)[..., 0].mT,
    "repeat": lambda x: x.repeat(1, 1, 2)[..., 1 : x.shape[-1] + 1],
    "take": lambda x: x.take(torch.arange(x.numel()).flip(0)).view(x.shape),
    "aminmax": lambda x: x - x.aminmax(dim=-1, keepdim=True)[0],
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "special softmax": lambda x: torch.special.softmax(x, -1),
    "fft": lambda x: torch.fft.fft(x).real,
    "histc": lambda x: x * torch.histc(x.detach(), 3)[0],
    "cdist": lambda x: torch.cdist(x, x) @ x,
    "pairwise_distance": lambda x: x * F.pairwise_distance(x, x + 1)[..., None],
    "sum_to_size": lambda x: x * x.sum_to_size(ROWS, TOKENS, 1),
    "svdvals": lambda x: x * torch.linalg.svdvals(x)[0, 0],
    "matrix_norm": lambda x: x * torch.linalg.matrix_norm(x)[:, None, None],
    "unfold": lambda x: x.unfold(-1, 2, 1).sum(-1).repeat(1, 1, 2)[..., : x.shape[-1]],
    "tile": lambda x: x.tile(1, 1, 2)[..., 1 : x.shape[-1] + 1],
    "index_put": lambda x: torch.zeros(x.shape).double().index_put((torch.arange(ROWS),), x)
    .softmax(-1),
    "written elsewhere": written,
    "added elsewhere": added,
    "vmap": torch.vmap(lambda row: row / row.sum()),
    "func.grad": torch.func.grad(lambda y: y.logsumexp(-1).sum()),
    "numpy": lambda x: x * float(x.detach().numpy().max()),
    "list": lambda x: x * torch.tensor(x.detach().tolist()).max(),
    "item": lambda x: x * x.max().item(),
    "subclass": lambda x: x.as_subclass(torch.Tensor).softmax(-1),
    "numbers of features": lambda x: x * torch.arange(x.shape[-1]),
    "a buffer's first": lambda x: x * torch.linspace(0, 1, WIDTH)[: x.shape[-1]],
    "whole beside it": lambda x: x * torch.linspace(0, 1, WIDTH),
    "batch_norm of all": lambda x: F.batch_norm(x.mT, *torch.ones(2, WIDTH).double()).mT,
    "prelu": lambda x: F.prelu(x.mT, torch.linspace(0, 1, WIDTH).double()).mT,
    "gate in one": gated,
    "groups": lambda x: x.unflatten(-1, (3, -1)).softmax(-1).flatten(2),
    "groups by view": lambda x: x.view(ROWS, TOKENS, 2, -1).softmax(2).flatten(2),
    "groups by size": lambda x: x.reshape(ROWS, TOKENS, 2, x.shape[-1] // 2).softmax(2).flatten(2),
    "some heads": lambda x: features(heads(x) + heads(x)[:, :1]),
    "sum of heads": lambda x: features(heads(x) + sum(heads(x).unbind(1))[:, None]),
    "heads in turn": lambda x: torch.stack(heads(x).unbind(1)[::-1], 2).flatten(2),
}  # fmt: skip


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.down(self.function(self.up(x)))


def outcome(model: Any) -> list[Any]:
    out = model(X)
    return outcome_of(model, out, (out * X).sum())


def verdicts(start: Any, plan: dict[str, str], size: int, **options: Any) -> set[str]:
    """Say what ranks make of a model: 'refused', 'right' or 'wrong'."""
    wanted = outcome(copy.deepcopy(start))

    def body(comm: rd.Communicator) -> str:
        model = copy.deepcopy(start)
        rd.apply_plan(model, plan, rd.Mesh(tp=size, comm=comm), **options)
        try:
            found = outcome(model)
        except InvalidArgumentError:
            return "refused"
        off = max((a - b).abs().max() for a, b in zip(found, wanted, strict=True))
        return "right" if off <= 1e-12 * max(b.abs().max() for b in wanted) else "wrong"

    return {*rd.run(body, size, "threads")}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_function_between_layers_is_right_or_refused(name: str, size: int) -> None:
    function = RIGHT.get(name) or WRONG[name]
    word = "right" if name in RIGHT else "refused"
    assert verdicts(Model(function), {"up": "column:2", "down": "row:2"}, size) == {word}


class Attention(nn.Module):  # type: ignore[misc, name-defined]
    """Attention of four heads, or of as many as a region says."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.dim, self.shape = 4, 3, shape
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))

    def forward(self, x: Any) -> Any:
        q, k, v = SHAPES[self.shape](self, x)
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.out(seen.transpose(1, 2).flatten(2))


def apart(change: Any) -> Any:
    return lambda m, x: [change(m, one(x)).transpose(1, 2) for one in (m.q, m.k, m.v)]


SHAPES: dict[str, Any] = {
    "-1, dim": apart(lambda m, y: y.view(*y.shape[:2], -1, m.dim)),
    "heads, -1": apart(lambda m, y: y.view(*y.shape[:2], m.heads, -1)),
    "heads, dim": apart(lambda m, y: y.view(*y.shape[:2], m.heads, m.dim)),
    "heads by size": apart(lambda m, y: y.reshape(*y.shape[:2], m.heads, y.shape[-1] // m.heads)),
    "dim by size": apart(lambda m, y: y.view(*y.shape[:2], y.shape[-1] // m.dim, m.dim)),
    "rows and heads": apart(lambda m, y: y.view(-1, y.shape[1], m.heads, m.dim)),
    "tokens last": apart(lambda m, y: y.mT.reshape(ROWS, -1, m.dim, TOKENS).permute(0, 3, 1, 2)),
    "fused by three": lambda m, x: m.all(x).unflatten(-1, (3, -1, m.dim)).permute(2, 0, 3, 1, 4),
    "fused by heads": lambda m, x: m.all(x).unflatten(-1, (-1, 3, m.dim)).permute(3, 0, 2, 1, 4),
    "fused and counted": lambda m, x: (
        m.all(x).view(ROWS, TOKENS, 3, m.heads, m.dim).permute(2, 0, 3, 1, 4)
    ),
    "fused, in chunks": lambda m, x: [
        y.unflatten(-1, (-1, m.dim)).transpose(1, 2) for y in m.all(x).chunk(3, -1)
    ],
    "fused heads in chunks": lambda m, x: (
        m.all(x).unflatten(-1, (-1, 3 * m.dim)).transpose(1, 2).chunk(3, -1)
    ),
}
APART = {"[qkv]": "column:dim", "out": "row:dim"}
FUSED = {"all": "qkv:dim", "out": "row:dim"}
PLANS: dict[str, dict[str, str]] = {
    "column": {"[qkv]": "column", "out": "row"},
    "column:dim": APART,
    "region": APART | {"": "region:heads"},
    "region, column": {"": "region:heads", "[qkv]": "column", "out": "row"},
    "qkv": FUSED,
    "qkv in a region": FUSED | {"": "region:heads"},
    "fused by heads": FUSED | {"all": "column:dim*3"},
    "fused by heads in a region": FUSED | {"": "region:heads", "all": "column:dim*3"},
    "fused as it lies": FUSED | {"all": "column"},
    "fused in heads": FUSED | {"all": "column:dim"},
}
#: What must be taken, on 2 ranks and on 3.
TAKEN = {
    ("-1, dim", "column:dim"), ("-1, dim", "region"), ("heads, -1", "region"),
    ("heads, dim", "region"), ("heads by size", "region"), ("dim by size", "column:dim"),
    ("dim by size", "region"), ("rows and heads", "region"), ("tokens last", "column:dim"),
    ("tokens last", "region"), ("fused by three", "qkv"), ("fused, in chunks", "qkv"),
    ("fused and counted", "qkv in a region"), ("fused by three", "qkv in a region"),
    ("fused, in chunks", "qkv in a region"), ("fused by heads", "fused by heads"),
    ("fused heads in chunks", "fused by heads"),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_heads_are_right_or_refused(shape: str, size: int) -> None:
    for name, plan in PLANS.items():
        start, fused = Attention(shape), "fused" in shape
        words = {key: word for key, word in plan.items() if key != ("[qkv]" if fused else "all")}
        if fused is not ("all" in plan):
            continue
        for unused in ("q", "k", "v") if fused else ("all",):
            delattr(start, unused)
        said = verdicts(start, words, size)
        assert said in ({"right"}, {"refused"}), (name, said)
        assert said == {"right"} or (shape, name) not in TAKEN, name


@pytest.mark.parametrize("first", ["no_grad", "inference_mode", "eval"])
def test_another_kind_of_pass_is_looked_at_by_itself(first: str) -> None:
    """A validation pass says nothing of a branch that training takes."""

    def body(comm: rd.Communicator) -> None:
        model = Model(None)
        model.function = lambda x: x.softmax(-1) if model.training else x.relu()
        rd.apply_plan(model, {"up": "column", "down": "row"}, rd.Mesh(tp=2, comm=comm))
        model.eval()
        with torch.enable_grad() if first == "eval" else getattr(torch, first)():
            for _ in range(2):
                model(X)
        model.train()
        with pytest.raises(InvalidArgumentError, match=r"softmax.*up leaves features cut"):
            model(X)

    rd.run(body, 2, "threads")


BESIDE: dict[str, tuple[Any, str]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), "norm sharded"),
    "PReLU": (lambda: nn.PReLU(WIDTH), "norm sharded"),
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), "norm sharded"),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), "replicate"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_layer_of_the_whole_width_is_named_with_its_sizes(name: str) -> None:
    make, word = BESIDE[name]

    def body(comm: rd.Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, WIDTH), make(), nn.Linear(WIDTH, 4))
        rd.apply_plan(model, {"0": "column", "1": word, "2": "row"}, rd.Mesh(tp=2, comm=comm))
        with pytest.raises(InvalidArgumentError, match=r"(6 of 12|gets 6|leaves features cut)"):
            model(torch.ones(3, 4))

    rd.run(body, 2, "threads")


def test_a_shape_is_refused_with_the_length_of_the_dim_that_is_cut() -> None:
    def body(comm: rd.Communicator) -> None:
        model = Model(lambda x: x.transpose(1, 2).reshape(ROWS, 4, 3, TOKENS))
        rd.apply_plan(model, {"up": "column:3", "down": "row:3"}, rd.Mesh(tp=2, comm=comm))
        with pytest.raises(InvalidArgumentError, match=r"6 features or heads of 12.*column:head"):
            model(X)

    rd.run(body, 2, "threads")


class Between(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.hook: Any = None

    def forward(self, x: Any) -> Any:
        if self.hook is not None:
            x = x * 1
            x.register_hook(self.hook)
        return x.tanh()


#: Hooks that see gradients of what is cut, and whether they are right for a part.
HOOKS: dict[str, tuple[Any, bool]] = {
    "scaled": (lambda g: 2 * g, True),
    "cut off": (lambda g: g.clamp(-0.1, 0.1), True),
    "in place": (lambda g: g.clone().mul_(3), True),
    "over tokens": (lambda g: g - g.mean(1, keepdim=True), True),
    "norm": (lambda g: g / (1 + g.norm()), False),
    "over features": (lambda g: g - g.mean(-1, keepdim=True), False),
    "number": (lambda g: g * min(1.0, g.abs().max().item()), False),
}


def hang(model: Any, hook: Any, how: str) -> Any:
    """Have a model call a hook for a gradient of features."""
    layer: Any = model.function if how == "between" else getattr(model, how.rsplit(maxsplit=1)[-1])
    if how == "function":
        model.function.hook = hook
    elif how == "before up":
        layer.register_full_backward_pre_hook(lambda _, given: (hook(given[0]),))
    else:
        layer.register_full_backward_hook(lambda _, given, __: (hook(given[0]),))
    return model


@pytest.mark.parametrize("how", ["function", "up", "before up", "down", "between"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_gradients_as_parts(name: str, how: str) -> None:
    """By element they are one device's; along features they are refused, on all ranks."""
    hook, right = HOOKS[name]
    start, x = Model(Between()), X.clone().requires_grad_()

    def body(comm: rd.Communicator) -> list[Any]:
        model = hang(copy.deepcopy(start), hook, how)
        rd.apply_plan(model, {"up": "column", "down": "row"}, rd.Mesh(tp=2, comm=comm))
        out = model(x.detach().requires_grad_())
        if right or how == "up":  # whose input all ranks have whole
            return outcome_of(model, out, out.square().sum())
        with pytest.raises(InvalidArgumentError, match="up leaves features cut"):
            out.square().sum().backward()
        return []

    alone = hang(copy.deepcopy(start), hook, how)
    out = alone(x)
    wanted = outcome_of(alone, out, out.square().sum())
    for found in rd.run(body, 2, "threads"):
        for one, other in zip(found, wanted, strict=bool(found)):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_what_is_cut_are_parts() -> None:
    def body(comm: rd.Communicator) -> None:
        kept: list[Any] = []

        def keep(x: Any) -> Any:
            kept.append(x)
            return x.tanh()

        model = Model(keep)
        rd.apply_plan(model, {"up": "column", "down": "row"}, rd.Mesh(tp=2, comm=comm))
        loss = model(X).square().sum()
        asked = torch.autograd.grad(loss, [kept[0], model.up.weight], retain_graph=True)[0]
        kept[0].retain_grad()
        loss.backward()
        for gradient in (asked, kept[0].grad):
            torch.testing.assert_close(rd.local(gradient), rd.local(asked))
            with pytest.raises(InvalidArgumentError, match="up leaves features cut"):
                gradient.norm()

    rd.run(body, 2, "threads")
