"""Features that stay cut: every function of torch is right on them, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.parallel.conftest import outcome_of

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from roundelay.parallel.cut_tensor import CutTensor  # noqa: E402 - only with torch

nn, F = torch.nn, torch.nn.functional
ROWS, TOKENS, WIDTH, HEADS = 2, 3, 12, 6
TARGETS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % WIDTH
ANY = torch.linspace(-1, 1, ROWS * TOKENS * WIDTH).view(ROWS, TOKENS, WIDTH).double()


def by_heads(x: Any) -> Any:
    """Divide features into heads, of which a rank has some, or all: [rows, heads, tokens, dim]."""
    return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


def attend(x: Any) -> Any:
    q = by_heads(x)
    scores = (q @ q.transpose(-1, -2)).softmax(-1)
    return (scores @ q).transpose(1, 2).reshape(x.shape)


#: From a tensor of some features to one of as many.
BETWEEN: dict[str, Any] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "scaled": lambda x: 2 * x / 3 - 1,
    "gate": lambda x: x * x.sigmoid(),
    "softmax": lambda x: x.softmax(-1),
    "softmax by place": lambda x: torch.softmax(x, 2),
    "softmax over tokens": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm of all": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "own rms": lambda x: x * x.pow(2).mean(-1, keepdim=True).add(1).rsqrt(),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize tokens": lambda x: F.normalize(x, dim=1),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "mean of all": lambda x: x - x.mean(),
    "mean of tokens": lambda x: x - x.mean(1, keepdim=True),
    "max": lambda x: x - x.amax(-1, keepdim=True),
    "max with dim": lambda x: x - x.max(-1, keepdim=True).values,
    "max of all": lambda x: x / x.max(),
    "larger": lambda x: torch.max(x, -x),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "norm by place": lambda x: x / x.norm(2, -1, keepdim=True),
    "std": lambda x: x / x.std(-1, keepdim=True),
    "vector norm": lambda x: x / torch.linalg.vector_norm(x, dim=2, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of tokens": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(-1),
    "flip tokens": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, -1),
    "roll all": lambda x: x.roll(1),
    "sort": lambda x: x.sort().values,
    "sort tokens": lambda x: x.sort(1).values,
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "gate in one": lambda x: F.glu(x).repeat(1, 1, 2),
    "first": lambda x: x + x[..., :1],
    "narrow": lambda x: x + x.narrow(-1, 0, 1),
    "one": lambda x: x + x[:, :, 0, None],
    "tokens": lambda x: x + x[:, :1],
    "swapped": lambda x: x.transpose(1, 2).cumsum(-1).transpose(1, 2),
    "swapped wrong": lambda x: x.mT.softmax(1).mT,
    "heads": attend,
    "sdpa": lambda x: (
        F.scaled_dot_product_attention(*[by_heads(x)] * 3).transpose(1, 2).reshape(x.shape)
    ),
    "norm of heads": lambda x: F.normalize(by_heads(x), dim=-1).transpose(1, 2).flatten(2),
    "mean over heads": lambda x: x + by_heads(x).mean(1).repeat(1, 1, x.size(-1) * HEADS // WIDTH),
    "softmax over heads": lambda x: by_heads(x).softmax(1).transpose(1, 2).reshape(x.shape),
    "loop over heads": lambda x: torch.stack(
        [h.softmax(-1) for h in by_heads(x).unbind(1)], 2
    ).flatten(2),
    "heads with rows": lambda x: (
        x.transpose(0, 1)
        .contiguous()
        .view(x.size(1), -1, WIDTH // HEADS)
        .transpose(0, 1)
        .softmax(-1)
        .transpose(0, 1)
        .reshape(x.size(1), x.size(0), -1)
        .transpose(0, 1)
    ),
    "rotary": lambda x: (
        torch.cat([-by_heads(x)[..., 1:], by_heads(x)[..., :1]], -1)
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    "transposed view": lambda x: x.permute(2, 0, 1).contiguous().softmax(0).permute(1, 2, 0),
    "topk": lambda x: x * (x >= x.topk(2).values[..., -1:]),
    "argmax": lambda x: x * (x.argmax(-1, keepdim=True) + 1),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "masked": lambda x: x.masked_fill(x < 0, -1),
    "where": lambda x: torch.where(x > 0, x, x / 2),
    "half and back": lambda x: x.float().double(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "index": lambda x: x + x[torch.tensor([1, 0])],
    "index features": lambda x: x + x[..., torch.tensor([0])],
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "rows in one": lambda x: x.flatten(0, 1).softmax(0).view_as(x),
    "all in one": lambda x: x.flatten(1).softmax(1).view_as(x),
}

#: What may be done with logits behind the model; what gives one number or token is refused.
BEHIND: dict[str, Any] = {
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.flatten() % 4),
    "cross_entropy, swapped": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS % 4),
    "its module": lambda x: nn.CrossEntropyLoss()(x.view(-1, x.size(-1)), TARGETS.flatten() % 4),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), TARGETS.flatten() % 4),
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "mse by hand": lambda x: (x - 1).pow(2).mean(),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "sum": lambda x: x.sum(),
    "torch.sum": torch.sum,
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "softmax": lambda x: x.softmax(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(1),
    "max": lambda x: x.max(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "numpy": lambda x: x.detach().numpy(),
    "list": lambda x: x.tolist(),
    "product": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("bsv->bs", x),
    "some": lambda x: x[..., :2],
    "one": lambda x: x[0, 0, 0],
    "save": lambda x: torch.save(x, "/dev/null"),
    "multinomial": lambda x: torch.multinomial(x.flatten(0, 1).exp(), 1),
    "copy": copy.deepcopy,
    "data": lambda x: x.data.argmax(-1),
    "unbound": lambda x: x[0].unbind(0)[0].argmax(),
}
#: What leaves features as they lie; a rank has its part of what one device gives.
LEFT: dict[str, Any] = {
    "shifted": lambda x: x[:, :-1].reshape(-1, x.size(-1)),
    "scaled": lambda x: (x.float() / 2).tanh(),
    "masked rows": lambda x: x[TARGETS > 2],
    "mean of tokens": lambda x: x.mean(1),
    "last": lambda x: x[:, -1],
    "detached": lambda x: x.detach().clone(),
    "rows": lambda x: torch.cat([x, x]),
    "stacked": lambda x: torch.stack([x, x]),
    "flat": lambda x: x.flatten(0, 1),
    "cpu": lambda x: x.cpu().contiguous(),
}


START: dict[str, Any] = {}


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.head = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.function = function or torch.tanh
        if START:
            self.load_state_dict(START)

    def forward(self, x: Any) -> Any:
        return self.head(self.down(self.function(self.up(x))))


START.update(Model().state_dict())
PLAN = {"up": "column", "down": "row", "head": "column gather"}
CUT = PLAN | {"head": "column"}


def outcome(model: Any) -> list[Any]:
    out = model(ANY)
    return outcome_of(model, out, (out * ANY).sum())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", BETWEEN)
def test_between_cut_layers(name: str, size: int) -> None:
    """What is computed is what one device computes; whatever is not, is refused on all ranks."""

    def body(comm: rd.Communicator) -> str:
        model = Model(BETWEEN[name])
        rd.apply_plan(model, PLAN, rd.Mesh(tp=size, comm=comm))
        try:
            found = outcome(model)
        except InvalidArgumentError as error:
            assert "up leaves features cut" in str(error)
            return "refused"
        wanted = outcome(Model(BETWEEN[name]))
        close = all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, wanted, strict=True))
        return "right" if close else "wrong"

    verdicts = rd.run(body, size, "threads")
    assert set(verdicts) in ({"right"}, {"refused"}), verdicts


def test_what_is_right_is_not_refused() -> None:
    """Elementwise functions, and those along other dims, are taken."""
    for name in (
        "relu",
        "gate",
        "softmax over tokens",
        "mean of tokens",
        "heads",
        "sdpa",
        "rotary",
        "norm of heads",
        "loop over heads",
        "heads with rows",
        "swapped",
        "in place",
        "tokens",
        "larger",
    ):

        def body(comm: rd.Communicator, name: str = name) -> None:
            model = Model(BETWEEN[name])
            rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
            outcome(model)

        rd.run(body, 2, "threads")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_a_part_is_not_taken_for_the_whole(name: str, grad: bool) -> None:  # noqa: FBT001
    def body(comm: rd.Communicator) -> None:
        model = Model()
        rd.apply_plan(model, CUT, rd.Mesh(tp=2, comm=comm))
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                with pytest.raises(
                    InvalidArgumentError, match=r"head leaves features cut.*rd.local"
                ):
                    BEHIND[name](model(ANY))
                BEHIND[name](rd.local(model(ANY)).detach().abs())

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("name", LEFT)
def test_what_leaves_features_is_this_rank_s_part(name: str) -> None:
    def body(comm: rd.Communicator) -> None:
        model = Model()
        rd.apply_plan(model, CUT, rd.Mesh(tp=2, comm=comm))
        found = LEFT[name](model(ANY))
        assert isinstance(found, CutTensor)
        with pytest.raises(InvalidArgumentError):
            found.sum()
        wanted = LEFT[name](Model()(ANY)).chunk(2, -1)[comm.rank]
        torch.testing.assert_close(rd.local(found), wanted)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("inside", [True, False])
def test_the_loss_of_cut_logits_takes_them(inside: bool) -> None:  # noqa: FBT001
    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(tp=2, comm=comm)
        model, alone = Model(), Model()
        rd.apply_plan(model, CUT, mesh)
        if inside:
            model.register_forward_hook(
                lambda _, __, out: rd.cross_entropy(out / 2, TARGETS, mesh["tp"])
            )
        out = model(ANY)
        loss = out if inside else rd.cross_entropy(out / 2, TARGETS, mesh["tp"])
        wanted = F.cross_entropy(alone(ANY).flatten(0, 1) / 2, TARGETS.flatten())
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(model.down.bias.grad, alone.down.bias.grad)

    rd.run(body, 2, "threads")


def test_a_loss_inside_of_the_model_is_refused() -> None:
    class WithLoss(Model):
        def forward(self, x: Any) -> Any:
            return F.cross_entropy(super().forward(x).flatten(0, 1), TARGETS.flatten() % 4)

    def body(comm: rd.Communicator) -> None:
        model = WithLoss()
        rd.apply_plan(model, CUT, rd.Mesh(tp=2, comm=comm))
        with pytest.raises(InvalidArgumentError, match=r"cross_entropy.* head leaves features cut"):
            model(ANY)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_prepared_models_hand_out_parts(strategy: str) -> None:
    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(dp=2, tp=2, comm=comm)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=CUT, strategy=strategy)
        for _ in range(2):
            out = model(ANY)
            with pytest.raises(InvalidArgumentError, match=r"sum.*rd.local"):
                out.sum()
            loss: Any = rd.cross_entropy(out, TARGETS, mesh["tp"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    rd.run(body, 4, "threads")


def test_layers_between_others_are_looked_at_once() -> None:
    """Outputs that a later layer has taken are ordinary tensors from the second pass on."""

    def body(comm: rd.Communicator) -> list[bool]:
        kinds: list[bool] = []

        def seen(x: Any) -> Any:
            kinds.append(isinstance(x, CutTensor))
            return x

        model = Model(seen)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        for _ in range(3):
            model(ANY).sum().backward()
        return kinds

    assert rd.run(body, 2, "threads")[0] == [True, False, False]


COUNTED: dict[str, tuple[str, Any]] = {
    "as many heads as on one device": ("column:2", lambda x: x.view(*x.shape[:2], HEADS, -1)),
    "of the dim of one device": ("column:2", lambda x: x.view(*x.shape[:2], HEADS, 2)),
    "that are cut apart": ("column", lambda x: x.unflatten(-1, (-1, 4))),
}


@pytest.mark.parametrize("name", COUNTED)
def test_heads_that_are_not_this_rank_s_are_refused(name: str) -> None:
    word, function = COUNTED[name]

    def body(comm: rd.Communicator) -> None:
        model = Model(lambda x: F.normalize(function(x), dim=-1).flatten(2))
        rd.apply_plan(model, PLAN | {"up": word}, rd.Mesh(tp=2, comm=comm))
        with pytest.raises(InvalidArgumentError, match=r"on what up gives.*'region:num_heads'"):
            model(ANY)

    rd.run(body, 2, "threads")


def test_outputs_that_are_taken_once_and_given_out_once_stay_marked() -> None:
    class Both(Model):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return {"y": y, "cut": self.up(x)}

    def body(comm: rd.Communicator) -> None:
        model = Both()
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        for _ in range(3):
            out = model(ANY)
            out["y"].sum()
            with pytest.raises(InvalidArgumentError, match="up leaves features cut"):
                out["cut"].sum()

    rd.run(body, 2, "threads")


def test_a_whole_tensor_is_its_own_part() -> None:
    assert rd.local(ANY) is ANY
