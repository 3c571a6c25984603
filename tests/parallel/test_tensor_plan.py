"""Plans that do not fit are refused by name, on all ranks, before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, UnknownNameError

torch = pytest.importorskip("torch")

from roundelay.parallel.tensor._match import kind_of  # noqa: E402 - only with torch
from roundelay.parallel.tensor.plan import apply_plan  # noqa: E402
from roundelay.parallel.tensor.plans import plans  # noqa: E402

nn = torch.nn


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.heads, self.odd = 4, 3, 7
        self.norm = nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 4)).transpose(1, 3).unbind(2)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "embed": "embedding", "*.norm": "norm", "*.qkv": "qkv:head_dim", "*.out": "row:head_dim",
    "*.drop": "dropout", "head": "column",
}  # fmt: skip


def without(*names: str) -> dict[str, str]:
    return {name: word for name, word in PLAN.items() if name not in names}


def attention(**options: Any) -> Any:
    return nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, **options)})


def normed() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def embedding(**options: Any) -> Any:
    return nn.Embedding(9, 4, **options)


MHA = {"attention": "replicate", "attention.out_proj": "row"}
#: Model, plan, options of `apply_plan`, and words that the refusal says.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "pattern": (Model, {**PLAN, "*.key": "column", "*.o": "row"}, {}, ["match no", "*.key, *.o"]),
    "layers": (Model, without("*.out", "*.norm"), {},
               ["no pattern names", "blocks.0.norm, blocks.0.out, blocks.1.norm", "'replicate'"]),
    "dropout": (Model, without("*.drop"), {}, ["no pattern names: blocks.0.drop, blocks.1.drop"]),
    "other model": (nn.LayerNorm, {"x": "row"}, {}, ["another model"]),
    "shipped": (Model, "llama", {}, ["another model", "model.embed_tokens", "embed, blocks.0.n"]),
    "no such": (Model, "lama", {}, ["plans has no 'lama'", "Did you mean 'llama'"]),
    "nothing": (Model, {}, {}, ["another model"]),
    "no plan": (Model, ["column"], {}, ["maps patterns", "gpt2"]),
    "keys": (Model, {3: "column"}, {}, ["maps patterns"]),
    "word": (Model, {**PLAN, "head": "colum"}, {}, ["no 'colum'", "'column'"]),
    "no word": (Model, {**PLAN, "head": " "}, {}, ["are words"]),
    "no text": (Model, {**PLAN, "head": None}, {}, ["are words"]),
    "second word": (Model, {**PLAN, "head": "column sharded"}, {}, ["after 'column'", "gather"]),
    "colon": (Model, {**PLAN, "*.norm": "norm:3"}, {}, ["colon"]),
    "tied": (Model, {**PLAN, "head": "row"}, {}, ["embed.weight along dim 0", "head.weight along"]),
    "tied whole": (Model, {**PLAN, "head": "replicate"}, {}, ["head.weight stays whole"]),
    "few heads": (Model, PLAN, {"size": 4},
                  ["blocks.0.qkv has 3 times 4 features", "tp=3 or less", "blocks.1.out"]),
    "few tokens": (lambda: nn.Embedding(3, 2), {"": "embedding"}, {"size": 4},
                   ["the model itself has 3 features", "tp=3"]),
    "odd heads": (Model, {**PLAN, "*.qkv": "qkv:odd"}, {}, ["36 outputs", "width 7"]),
    "odd width": (Model, {**PLAN, "*.out": "row:odd"}, {}, ["12 features", "'odd'"]),
    "no attribute": (Model, {**PLAN, "*.out": "row:width"}, {}, ["'width'", "blocks.0, blocks"]),
    "not linear": (Model, {**PLAN, "*.norm": "column"}, {}, ["blocks.0.norm is a LayerNorm"]),
    "no embedding": (Model, {**PLAN, "*.norm": "embedding"}, {}, ["LayerNorm", "nn.Embedding"]),
    "no dropout": (Model, {**PLAN, "*.norm": "dropout"}, {}, ["LayerNorm", "nn.Dropout"]),
    "kind of dropout": (lambda: nn.Dropout2d(0.5), {"": "dropout"}, {}, ["Dropout2d", "seed"]),
    "attention": (attention, MHA, {}, ["never calls it"]),
    "computed": (normed, {"*": "replicate", "": "column"}, {}, ["computed from others"]),
    "lazy": (lambda: nn.LazyLinear(3), {"": "column"}, {}, ["LazyLinear"]),
    "max_norm": (lambda: embedding(max_norm=1.0), {"": "embedding"}, {}, ["max_norm"]),
    "frequency": (lambda: embedding(scale_grad_by_freq=True), {"": "embedding"}, {}, ["by_freq"]),
    "own parameters": (lambda: nn.Linear(4, 4), {"": "split"}, {}, ["parameter of its own"]),
    "region twice": (Model, {**PLAN, "blocks": "region", "blocks.?": "region"}, {}, ["inside of"]),
    "norm in a region": (Model, {**PLAN, "blocks.?": "region"}, {}, ["'norm sharded'"]),
    "whole in a region": (Model, {**PLAN, "blocks.?": "region", "*.norm": "replicate"}, {},
                          ["blocks.0.norm lies in", "'norm sharded'"]),
    "both": (Model, {**PLAN, "*.norm": "norm sharded gather"}, {}, ["one of them"]),
    "no count": (Model, {**PLAN, "blocks.?": "region:width", "*.norm": "norm sharded"}, {},
                 ["blocks.0 has no attribute 'width'"]),
    "odd count": (Model, {**PLAN, "blocks.?": "region:heads,odd", "*.norm": "norm sharded"}, {},
                  ["blocks.0.odd is 7", "heads, which is 3"]),
    "few counted": (Model, {**PLAN, "blocks.?": "region:heads", "*.norm": "norm sharded"},
                    {"size": 4}, ["blocks.0 has 3 features"]),
    "no beginning": (Model, {**PLAN, "embed": "embedding whole"}, {"sequence_parallel": True},
                     ["'split' for the first block"]),
    "dim": (Model, PLAN, {"sequence_dim": 2}, ["sequence_dim is 1"]),
    "no dim": (Model, PLAN, {"sequence_dim": True}, ["sequence_dim is 1"]),
    "no model": (lambda: [3], PLAN, {}, ["a model of torch"]),
    "no axis": (Model, PLAN, {"axis": "dp"}, ["axis tp", "mesh has dp=2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, plan, options, words = REFUSED[name]
    options = dict(options)
    size, axis = options.pop("size", 2), options.pop("axis", "tp")
    start = make() if make is not nn.LayerNorm else nn.LayerNorm(3)

    def body(comm: rd.Communicator) -> None:
        model = copy.deepcopy(start)
        mesh = rd.Mesh(comm=comm, **{axis: size})
        with pytest.raises(InvalidArgumentError) as caught:
            apply_plan(model, plan, mesh, **options)
        for word in words:
            assert word in str(caught.value), str(caught.value)
        if isinstance(start, nn.Module):
            assert repr(model) == repr(start)
            for one, other in zip(model.parameters(), start.parameters(), strict=True):
                assert type(one) is type(other)
                assert "sharding" not in vars(one)

    rd.run(body, size, "threads")


def test_all_mistakes_are_told_at_once() -> None:
    def body(comm: rd.Communicator) -> None:
        plan = {**without("*.drop"), "*.key": "column", "*.out": "row:odd", "head": "replicate"}
        with pytest.raises(InvalidArgumentError) as caught:
            apply_plan(Model(), plan, rd.Mesh(tp=2, comm=comm))
        assert len(str(caught.value).splitlines()) == 6

    rd.run(body, 2, "threads")


def test_no_mesh() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a mesh"):
        apply_plan(Model(), PLAN, None)  # type: ignore[arg-type]


def refused(body: Any, size: int) -> list[BaseException]:
    def rank_of(comm: rd.Communicator) -> BaseException:
        with pytest.raises(rd.RoundelayError) as caught:
            body(comm)
        return caught.value

    return rd.run(rank_of, size, "threads")


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 1}], ids=str)
def test_plans_models_and_options_that_differ(axes: dict[str, int]) -> None:
    def other_plan(comm: rd.Communicator) -> None:
        plan = {**PLAN, "head": "column gather"} if comm.rank else PLAN
        apply_plan(Model(), plan, rd.Mesh(comm=comm, **axes))

    def other_option(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        apply_plan(Model(), PLAN, mesh, sequence_parallel=bool(comm.rank))

    def other_model(comm: rd.Communicator) -> None:
        model = Model()
        if comm.rank:
            model.embed = nn.Embedding(8, 12)
            model.head.weight = model.embed.weight
        apply_plan(model, PLAN, rd.Mesh(comm=comm, **axes))

    for body in (other_plan, other_option, other_model):
        errors = refused(body, 2)
        assert all(isinstance(error, CollectiveMismatch) for error in errors)

    def wrong(comm: rd.Communicator) -> None:
        apply_plan(Model(), "none" if comm.rank else PLAN, rd.Mesh(comm=comm, **axes))

    kinds = [type(error) for error in refused(wrong, 2)]
    assert kinds == [CollectiveMismatch, InvalidArgumentError]


def test_a_plan_is_applied_once() -> None:
    def body(comm: rd.Communicator) -> None:
        model, mesh = Model(), rd.Mesh(tp=2, comm=comm)
        apply_plan(model, PLAN, mesh)
        with pytest.raises(InvalidArgumentError, match="is cut already"):
            apply_plan(model, PLAN, mesh)

    rd.run(body, 2, "threads")


def test_the_last_pattern_counts() -> None:
    def body(comm: rd.Communicator) -> None:
        model = Model()
        apply_plan(model, {"*": "replicate", **PLAN}, rd.Mesh(tp=3, comm=comm))
        assert model.blocks[1].qkv.weight.shape == (12, 12)
        assert model.embed.weight is model.head.weight
        assert isinstance(model.head, nn.Linear)
        model = Model()
        apply_plan(model, {**PLAN, "*": "replicate"}, rd.Mesh(tp=3, comm=comm))
        assert model.blocks[1].qkv.weight.shape == (36, 12)

    rd.run(body, 3, "threads")


SEQUENCE = {
    "a length that does not divide": (PLAN, 7, "7 tokens do not divide by the 2 ranks of tp"),
    "replicate on shards": ({**PLAN, "*.norm": "replicate"}, 8, "Say 'norm'"),
    "norm on the whole": ({**PLAN, "embed": "embedding whole", "blocks.1": "split"}, 8,
                          "blocks.0.norm expects this rank's shard"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequences_that_do_not_fit_are_refused_by_the_first_pass(name: str) -> None:
    plan, length, words = SEQUENCE[name]

    def body(comm: rd.Communicator) -> None:
        model = Model().eval()
        apply_plan(model, plan, rd.Mesh(tp=2, comm=comm), sequence_parallel=True)
        with pytest.raises(InvalidArgumentError, match=words):
            model(torch.zeros(1, length, dtype=torch.int64))

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("name", plans.names())
def test_plans_that_ship_are_well_formed(name: str) -> None:
    for value in plans.load(name).values():
        kind_of(value)


def test_an_unknown_name_is_told_as_such() -> None:
    with pytest.raises(UnknownNameError):
        plans.load("bert")


MISTAKES = {
    "row first": ({"0": "row", "2": "replicate"}, "0 expects this rank's part"),
    "column twice": ({"0": "column", "2": "column"}, "2 expects its whole input"),
    "whole after column": ({"0": "column", "2": "replicate"}, "2 expects its whole input"),
}


@pytest.mark.parametrize("which", MISTAKES)
def test_features_that_are_cut_where_whole_ones_are_due_are_told_by_the_layer(which: str) -> None:
    plan, words = MISTAKES[which]

    def body(comm: rd.Communicator) -> str:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        rd.apply_plan(model, plan, rd.Mesh(tp=2, comm=comm))
        with pytest.raises(InvalidArgumentError) as caught:
            model(torch.ones(3, 4))
        return str(caught.value)

    for text in rd.run(body, 2, "threads"):
        assert words in text
        assert "take them in turns" in text


@pytest.mark.parametrize("sharded", ["between", "inside", "both"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_of_shards_are_for_shards(ranks: int, sharded: str) -> None:
    """Where all ranks have the same activations, masks of their own would drive them apart."""
    inside, between = sharded != "between", sharded != "inside"
    plan = {"0": "column", "1": "dropout sharded" if inside else "dropout", "2": "row",
            "3": "dropout sharded" if between else "dropout"}  # fmt: skip

    def body(comm: rd.Communicator) -> str:
        layers = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4), nn.Dropout(0.5)
        model = nn.Sequential(*layers)
        apply_plan(model, plan, rd.Mesh(tp=comm.size, comm=comm))
        try:
            model(torch.ones(8, 4))
        except InvalidArgumentError as error:
            return str(error)
        return "nothing"

    told = rd.run(body, ranks, "threads")
    words = "3 is 'dropout sharded'" if between else "nothing"
    assert all(words in one for one in told), told


@pytest.mark.parametrize("order", ["kv,heads,width", "heads,kv,width", "width,heads,kv"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_attributes_that_count_heads_come_in_any_order(order: str, ranks: int) -> None:
    class Attention(nn.Sequential):  # type: ignore[misc, name-defined]
        kv, heads, width = 2, 4, 16

    def body(comm: rd.Communicator) -> tuple[int, ...]:
        model = nn.Sequential(Attention(nn.Linear(4, 16), nn.Linear(16, 4)))
        plan = {"0": f"region:{order}", "0.0": "column:8", "0.1": "row:8"}
        apply_plan(model, plan, rd.Mesh(tp=comm.size, comm=comm))
        return model[0].kv, model[0].heads, model[0].width

    assert rd.run(body, ranks, "threads") == [(2 // ranks, 4 // ranks, 16 // ranks)] * ranks


def test_one_module_by_two_names_has_one_word() -> None:
    def body(comm: rd.Communicator) -> list[str]:
        said = []
        for plan in ({"0": "column gather"}, {"[02]": "column gather"},
                     {"0": "column gather", "2": "replicate"}):  # fmt: skip
            layer = torch.nn.Linear(4, 4)
            model = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
            try:
                rd.apply_plan(model, plan, rd.Mesh(tp=2, comm=comm))
                said.append(str(tuple(model(torch.ones(1, 4)).shape)))
            except InvalidArgumentError as error:
                said.append(str(error).splitlines()[1].strip())
        return said

    one = "0 and 2 are one module, and the plan says different words of them."
    assert rd.run(body, 2, "threads") == [["(1, 4)", "(1, 4)", one]] * 2
