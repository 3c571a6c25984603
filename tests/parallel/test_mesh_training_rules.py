"""What a mesh compares, decides and refuses, on all of its ranks alike."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import (  # noqa: E402
    CLASSES,
    ROWS,
    SEQUENCE,
    adam,
    close,
    divide,
    even,
    loss_of,
    make_data,
    make_net,
    my_share,
    one_device,
    prepare_on,
    train,
)

from roundelay.errors import (  # noqa: E402 - only with torch
    CollectiveMismatch,
    InvalidArgumentError,
    NotFiniteError,
)
from roundelay.parallel import functions  # noqa: E402
from roundelay.parallel.sharding import shard_parameter, sharding_of  # noqa: E402
from roundelay.training.strategies.ddp import Ddp  # noqa: E402
from roundelay.training.strategies.parameter_server import ParameterServer  # noqa: E402
from roundelay.training.strategies.zero import Zero  # noqa: E402


def refused(body: Any, ranks: int) -> list[str]:
    """What every rank was refused with."""

    def tried(comm: Any) -> str:
        try:
            body(comm)
        except (InvalidArgumentError, CollectiveMismatch) as error:
            return str(error)
        return "nothing"

    return rd.run(tried, ranks, "threads")


# ---- refusals

OPTIONS: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "both": ({"dp": 2}, {"comm": True}, "comm= or mesh=, not both"),
    "plan": ({"dp": 2}, {"plan": {"*": "column"}}, "along the axis tp of a mesh"),
    "sequence": ({"tp": 2}, {"sequence_parallel": True}, "Give plan=, too"),
    "async": ({"tp": 2}, {"strategy": "ps-async"}, "Use a synchronous strategy"),
    "dedicated": ({"dp": 2, "tp": 2}, {"strategy": ParameterServer(dedicated=True)},
                  "Leave out dedicated="),
}  # fmt: skip


@pytest.mark.parametrize("which", OPTIONS)
def test_what_prepare_can_not_take_is_refused_on_all_ranks(which: str) -> None:
    axes, options, words = OPTIONS[which]

    def body(comm: Any) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        more = {**options, **({"comm": comm} if "comm" in options else {})}
        net = make_net()
        rd.prepare(net, adam(net.parameters()), mesh=mesh, **more)

    texts = refused(body, int(np.prod([*axes.values()])))
    assert all(words in text for text in texts), texts


def test_what_is_no_mesh_is_refused() -> None:
    net = torch.nn.Linear(2, 2)
    for mesh in (3, "dp=2", {"dp": 2}):
        with pytest.raises(InvalidArgumentError, match="needs comm="):
            rd.prepare(net, adam(net.parameters()), mesh=mesh)  # type: ignore[call-overload, unused-ignore, arg-type]


def test_ranks_with_other_meshes_or_plans_are_told_on_all_ranks() -> None:
    def other(comm: Any) -> None:
        mesh = rd.Mesh(tp=2, comm=comm)
        net = make_net()
        how: dict[str, Any] = {"mesh": mesh} if comm.rank else {"comm": comm}
        rd.prepare(net, adam(net.parameters()), **how)

    def plans(comm: Any) -> None:
        mesh = rd.Mesh(tp=2, comm=comm)
        net = make_net()
        plan = {"up": "column" if comm.rank else "row"}
        rd.prepare(net, adam(net.parameters()), mesh=mesh, plan=plan)

    def cuts(comm: Any) -> None:
        mesh = rd.Mesh(dp=2, tp=2, comm=comm)
        net = make_net()
        shard_parameter(net.up.weight, even("tp", mesh["tp"], 1 if comm.rank == 3 else 0, 6))
        rd.prepare(net, adam(net.parameters()), mesh=mesh)

    assert all("no mesh" in text and "Mesh(tp=2)" in text for text in refused(other, 2))
    assert all("plan {'up': 'row'}" in text for text in refused(plans, 2))
    texts = refused(cuts, 4)
    assert all("divided along tp in dim 1" in text for text in texts), texts


def test_a_parameter_divided_along_an_axis_of_data_is_refused() -> None:
    def body(comm: Any, axis: str = "dp") -> None:
        mesh = rd.Mesh(dp=2, comm=comm)
        net = make_net()
        shard_parameter(net.up.weight, even(axis, mesh["dp"], 0, 12))
        rd.prepare(net, adam(net.parameters()), mesh=mesh)

    assert all("strategy='zero3' divides parameters along dp" in text for text in refused(body, 2))
    texts = refused(lambda comm: body(comm, "tp"), 2)
    assert all("Divide it along an axis of this mesh" in text for text in texts)


def test_an_optimizer_that_may_look_at_whole_parameters_is_refused() -> None:
    class Own(torch.optim.SGD):  # type: ignore[misc, name-defined]
        pass

    class Declared(Own):
        elementwise = True

    def body(comm: Any, kind: Any) -> None:
        mesh = rd.Mesh(tp=2, comm=comm)
        net = divide(make_net(), mesh)
        rd.prepare(net, kind(net.parameters(), lr=0.1), mesh=mesh)

    assert all("elementwise = True" in text for text in refused(lambda c: body(c, Own), 2))
    assert refused(lambda comm: body(comm, Declared), 2) == ["nothing", "nothing"]


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("ps", {"dp": 2, "ep": 2}), ("zero2", {"ep": 2}), (Zero(shard_over=2), {"dp": 2, "ep": 2}),
     (Ddp(hook=lambda *_: lambda: None), {"dp": 2, "ep": 2})],
)  # fmt: skip
def test_strategies_that_can_not_take_experts_are_refused(strategy: Any, axes: Any) -> None:
    net = make_net(experts=True)
    ranks = int(np.prod([*axes.values()]))
    texts = refused(lambda comm: prepare_on(comm, axes, net, strategy), ranks)
    assert all("experts" in text and ("'ddp'" in text or "hook=" in text) for text in texts), texts


def test_what_needs_whole_layers_is_refused_and_the_rest_works() -> None:
    net = make_net()

    def body(comm: Any) -> list[float]:
        _, mine, optimizer = prepare_on(comm, {"dp": 2, "tp": 2}, net, "zero3")
        with pytest.raises(InvalidArgumentError, match=r"unprepare would have up\.weight whole"):
            rd.unprepare(mine)
        with pytest.raises(InvalidArgumentError, match=r"rd\.full_state_dict"):
            rd.whole(mine)
        with rd.whole(mine.norm), torch.no_grad():
            mine.norm.weight.fill_(3.0)
        with pytest.raises(CollectiveMismatch, match=r"the parameter norm\.bias"), \
                rd.whole(mine.norm), torch.no_grad():  # fmt: skip
            mine.norm.bias.fill_(float(comm.rank))
        del optimizer
        return rd.full_state_dict(mine)["norm.weight"].tolist()

    assert rd.run(body, 4, "threads") == [[3.0] * 6] * 4


def test_a_mesh_of_data_alone_is_taken_back() -> None:
    net = make_net()
    alone, _, _ = one_device(net)

    def body(comm: Any) -> bool:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "cp": 2}, net, "zero2")
        train(mesh, mine, optimizer, make_data())
        mine, optimizer = rd.unprepare(mine)
        return all(close(one, alone.state_dict()[name]) for name, one in mine.state_dict().items())

    assert all(rd.run(body, 4, "threads"))


# ---- decisions


def test_all_ranks_start_from_the_first_ones_weights() -> None:
    net = make_net(experts=True)

    def body(comm: Any) -> list[str]:
        mesh = rd.Mesh(dp=2, ep=2, tp=2, comm=comm)
        mine = copy.deepcopy(net)
        divide(mine, mesh)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.add_(comm.rank * mesh.place["dp"])
        mine, _ = rd.prepare(mine, adam(mine.parameters()), mesh=mesh)
        state = rd.full_state_dict(mine)
        return [name for name, one in net.state_dict().items() if not torch.equal(state[name], one)]

    assert rd.run(body, 8, "threads") == [[]] * 8


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_a_gradient_that_is_not_finite_is_told_on_every_rank(strategy: str) -> None:
    net = make_net()

    def body(comm: Any) -> Any:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "tp": 2}, net, strategy)
        x, y = make_data(1)[0]
        loss = loss_of(mine, my_share(mesh, x), my_share(mesh, y))
        if comm.rank == 2:  # in the part of a layer that only this rank's column has
            mine.up.weight.register_hook(lambda grad: grad * float("nan"))
        try:
            loss.backward()
        except NotFiniteError as error:
            told = str(error)
        optimizer.zero_grad()
        train(mesh, mine, optimizer, []), optimizer.step
        return told

    for told in rd.run(body, 4, "threads"):
        assert "up.weight" in told
        assert "rank 2" in told


def test_a_step_is_skipped_on_all_ranks_or_on_none() -> None:
    net = make_net().float()

    def body(comm: Any) -> Any:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "tp": 2}, net, "zero2", precision="fp16")
        before = {name: one.clone() for name, one in rd.full_state_dict(mine).items()}
        x, y = (one.float() if one.is_floating_point() else one for one in make_data(1)[0])
        loss = loss_of(mine, my_share(mesh, x), my_share(mesh, y))
        hook = None
        if mesh.place["tp"] == 1:
            hook = mine.up.weight.register_hook(lambda grad: grad * float("inf"))
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = rd.full_state_dict(mine)
        if hook is not None:
            hook.remove()
        names = [name for name in before if name != "seen"]
        skipped = all(torch.equal(before[name], after[name]) for name in names)
        return skipped, mine._roundelay_run.run.setup.scaler.scale

    results = rd.run(body, 4, "threads")
    assert all(skipped for skipped, _ in results)
    assert len({scale for _, scale in results}) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "ep": 2}])
def test_mixed_precision_comes_near_one_device(axes: Any, precision: str) -> None:
    net = make_net(experts="ep" in axes).float()
    data = [(x.float(), y) for x, y in make_data()]
    alone = copy.deepcopy(net)
    optimizer = adam(alone.parameters())
    for x, y in data:
        loss_of(alone, x, y).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    def body(comm: Any) -> Any:
        mesh, mine, own = prepare_on(comm, axes, net, "zero2", precision=precision)
        train(mesh, mine, own, data)
        return rd.full_state_dict(mine), mine._roundelay_run.run.step.skipped

    for state, skipped in rd.run(body, 4, "threads"):
        if skipped:
            continue
        for name, one in alone.named_parameters():
            # Adam's first steps are signs: one that rounding turns costs twice the rate.
            assert float((state[name].float() - one.detach()).abs().max()) < 0.1, name


def test_ranks_beside_each_other_that_are_apart_are_told() -> None:
    net = make_net()

    def body(comm: Any) -> str:
        mesh, mine, optimizer = prepare_on(comm, {"tp": 2}, net, "ddp")
        train(mesh, mine, optimizer, make_data(1))
        if comm.rank == 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        try:
            train(mesh, mine, optimizer, make_data(2))
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    assert all("lr=0.01" in text and "0.5 on rank 1" in text for text in rd.run(body, 2, "threads"))


# ---- rows


class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """Numbers from 0 on."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


def test_rows_are_dealt_along_dp_and_ep_and_the_same_along_tp_and_cp() -> None:
    def body(comm: Any) -> Any:
        mesh = rd.Mesh(dp=2, cp=2, tp=2, comm=comm)
        rows = [*rd.loader(Rows(), 8, mesh=mesh, quiet=True)]
        return mesh.place, [batch.tolist() for batch in rows]

    results = rd.run(body, 8, "threads")
    by_dp: dict[int, list[Any]] = {}
    for place, rows in results:
        by_dp.setdefault(place["dp"], []).append(rows)
    assert all(rows == found[0] for found in by_dp.values() for rows in found)
    every = [row for found in by_dp.values() for batch in found[0] for row in batch]
    assert sorted(every) == list(range(24))

    texts = refused(
        lambda comm: rd.loader(Rows(), 8, mesh=rd.Mesh(tp=2, comm=comm), seed=comm.rank), 2
    )
    assert all("seed=0" in text and "seed=1" in text for text in texts)
    texts = refused(lambda comm: rd.loader(Rows(), 8, mesh=rd.Mesh(tp=2, comm=comm), comm=comm), 2)
    assert all("loader takes comm=" in text for text in texts)


def test_measures_on_a_mesh_are_those_of_one_device() -> None:
    net = make_net()
    x, y = make_data(1)[0]
    data = torch.utils.data.TensorDataset(x, y)
    with torch.no_grad():
        expected = loss_of(net.eval(), x, y).item()
    net.train()

    def body(comm: Any) -> Any:
        mesh, mine, _ = prepare_on(comm, {"dp": 2, "cp": 2, "tp": 2}, net, "zero3")
        batches = rd.loader(data, 6, mesh=mesh, model=mine, quiet=True)

        def measure(model: Any, batch: Any) -> Any:
            part = [one.tensor_split(2, 1)[mesh.place["cp"]] for one in batch]
            return {"loss": loss_of(model, *part), "tokens": part[1].numel()}

        found = rd.evaluate(mine, batches, measure, sums=["tokens"])
        return found["loss"], found["tokens"]

    for loss, tokens in rd.run(body, 8, "threads"):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert tokens == ROWS * SEQUENCE


# ---- the ledger, and verify


def test_the_ledger_counts_this_ranks_part_and_what_axes_send() -> None:
    net = make_net()

    def body(comm: Any) -> Any:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "tp": 2}, net, "ddp")
        train(mesh, mine, optimizer, make_data(2))
        book = rd.ledger(mine)
        assert "along tp" in str(book)
        return book

    book = rd.run(body, 4, "threads")[0]
    held = sum(one.numel() * 8 for one in net.parameters()) + 8
    divided = (net.up.weight.numel() + net.up.bias.numel() + net.down.weight.numel()) * 8
    assert len(book.entries) == 4
    for entry in book.entries:
        assert entry.measured.parameters == entry.predicted.parameters == held - divided // 2
        # Once, the ranks agree in which order gradients come.
        assert entry.sent == pytest.approx(entry.sent_predicted, abs=80)
        # y in forward, what is copied in backward; then verdicts, of 4 numbers, and the norm.
        tokens = ROWS // 2 * SEQUENCE * 6 * 8
        assert entry.along["tp"] >= 2 * tokens


def test_verify_says_yes_to_meshes_and_names_what_leaves_one_device() -> None:
    net, data = make_net(), make_data()
    verdict = rd.verify(lambda: net, adam, data, loss=loss_of, strategy="zero1", clip=0.1,
                        mesh={"dp": 2, "cp": 2, "tp": 2}, divide=divide)  # fmt: skip
    assert verdict.same, str(verdict)
    assert verdict.ranks == 8

    def wrong(model: Any, mesh: Any) -> None:
        divide(model, mesh)
        model.norm.register_forward_hook(lambda _, __, out: out * 1.001)

    def forgets(model: Any, mesh: Any) -> None:
        divide(model, mesh)
        own = functions.copy
        model.forward = lambda x: _without(model, x, own)

    found = rd.verify(lambda: net, adam, data, loss=loss_of, mesh={"tp": 2}, divide=wrong)
    assert found.first is not None
    assert (found.first.kind, found.first.parameter, found.first.step) == ("activation", "norm", 0)
    found = rd.verify(lambda: net, adam, data, loss=loss_of, mesh={"tp": 2}, divide=forgets)
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("gradient", 0)
    assert "the gradient of norm" in str(found)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_weighed_losses_of_experts_are_those_of_one_device(strategy: str) -> None:
    net = make_net(experts=True)
    verdict = rd.verify(lambda: net, adam, make_data(), loss=loss_of, strategy=strategy, clip=0.1,
                        mesh={"dp": 2, "ep": 2, "tp": 2}, divide=divide)  # fmt: skip
    assert verdict.same, str(verdict)


def test_what_experts_send_is_what_was_predicted() -> None:
    net = make_net(experts=True)

    def body(comm: Any) -> Any:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "ep": 2}, net, "ddp")
        train(mesh, mine, optimizer, make_data(2))
        return rd.ledger(mine).entries

    for entry in rd.run(body, 4, "threads")[0]:
        assert entry.sent == pytest.approx(entry.sent_predicted, abs=300)
        assert entry.measured.gradients == entry.predicted.gradients


def _without(model: Any, x: Any, own: Any) -> Any:
    """A forward pass whose layer forgets to bring the gradients of its input together."""
    del own
    x = model.embed(x)
    x = model.norm(x + torch.tanh(x).mean(1, keepdim=True)) + model.frozen(x)
    y = torch.nn.functional.linear(torch.tanh(model.up(x)), model.down.weight)
    y = functions.reduce(y, model.mesh["tp"])
    return (x + y + model.down.bias) @ model.embed.weight


def test_verify_refuses_what_is_no_mesh() -> None:
    net, data = make_net(), make_data(1)
    for options, words in (
        ({"mesh": {"dp": "two"}}, "a dict of axes"),
        ({"mesh": {"dp": 2}, "ranks": 3}, "Leave out ranks="),
        ({"mesh": {"cp": 3}}, "does not divide by it"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            rd.verify(lambda: net, adam, data, loss=loss_of, **options)


# ---- stages


class Stage(torch.nn.Module):  # type: ignore[misc, name-defined]
    """One half of a model, with the names that the whole has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        net = make_net()
        if number == 0:
            self.embed = net.embed
            self.register_buffer("seen", torch.ones(()))
        else:
            self.norm = net.norm
            self.register_buffer("later", torch.ones(2))

    def forward(self, x: Any) -> Any:
        return self.embed(x) if hasattr(self, "embed") else self.norm(x).square().sum(-1).mean()


def in_stages(comm: Any, mine: Any, x: Any) -> Any:
    """Run forward and backward over two stages, one after the other."""
    if comm.rank == 0:
        out = mine(x)
        comm.send(out.detach(), 1)
        grad = torch.empty_like(out)
        comm.recv(grad, 1)
        out.backward(grad)
    else:
        inside = torch.empty(*x.shape[:-1], 6, dtype=torch.float64)
        comm.recv(inside, 0)
        inside.requires_grad_()
        mine(inside * torch.arange(6)).backward()
        comm.send(inside.grad, 0)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_stages_are_clipped_saved_and_gathered_as_one_model(strategy: str, tmp_path: Any) -> None:
    whole = make_net()
    optimizer = adam([*whole.embed.parameters(), *whole.norm.parameters()])
    norms = []
    for x, _ in make_data(2):
        inside = whole.embed(x) * torch.arange(6)
        whole.norm(inside).square().sum(-1).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)))
        optimizer.step()
        optimizer.zero_grad()

    def body(comm: Any) -> Any:
        mesh = rd.Mesh(pp=2, dp=2, comm=comm)
        mine: Any = Stage(mesh.place["pp"])
        mine, own = rd.prepare(mine, adam(mine.parameters()), mesh=mesh, strategy=strategy)
        found = []
        for x, _ in make_data(2):
            in_stages(mesh["pp"], mine, my_share(mesh, x))
            found.append(float(own.clip_grad_norm_(0.01)))
            own.step()
            own.zero_grad()
        with pytest.raises(InvalidArgumentError, match="every stage has some"):
            own.state_dict()
        rd.save(tmp_path / "at", mine, own)
        state = {name: one.clone() for name, one in rd.full_state_dict(mine).items()}
        rd.load(tmp_path / "at", mine, own)
        after = dict(rd.whole_tensors(mine))
        return found, state, all(torch.equal(state[name], one) for name, one in after.items())

    for found, state, same in rd.run(body, 4, "threads"):
        assert found == pytest.approx(norms, rel=1e-12)
        assert {*state} == {"embed.weight", "seen", "norm.weight", "norm.bias", "later"}
        assert same
        for name in ("embed.weight", "norm.weight", "norm.bias"):
            assert close(state[name], whole.state_dict()[name]), name
    read = rd.read_checkpoint(tmp_path / "at")
    assert {*read.weights} == {*state}
    assert {*read.optimizers()[0]["state"]} == {"embed.weight", "norm.weight", "norm.bias"}
    assert read.weights["embed.weight"].shape == (6, CLASSES)


# ---- what ranks with parts of one model must do alike

PLAN = {"0": "norm", "1": "column", "3": "row"}
DEEDS = ("weight", "grad", "grad gone", "zero_grad", "step", "rows", "frozen")


def seeded(make: Any) -> Any:
    """Make a model, alike on ranks that are threads, which share torch's random numbers."""
    with DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


DRAWING = threading.Lock()


def small() -> Any:
    net = seeded(
        lambda: torch.nn.Sequential(
            torch.nn.LayerNorm(6), torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
    )
    return net, torch.optim.SGD(net.parameters(), lr=0.5)


def odd_one_out(comm: Any, deed: str, strategy: str, axes: dict[str, int]) -> None:
    """Train; the ranks that are second along tp do one thing otherwise."""
    mesh = rd.Mesh(comm=comm, **axes)
    net, optimizer = rd.prepare(*small(), mesh=mesh, plan=PLAN, strategy=strategy)
    odd = mesh.place["tp"] == 1
    for step in range(2):
        seed = 10 * step + (mesh.place["tp"] if deed == "rows" else 0)
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()
        net(rows).square().mean().backward()
        if deed == "grad" and odd:
            net[0].weight.grad.mul_(3)
        if deed == "grad gone" and odd:
            net[0].weight.grad = None
        if deed != "step" or not odd:
            optimizer.step()
        if deed != "zero_grad" or not odd:
            optimizer.zero_grad()
        if deed == "weight" and odd:
            with torch.no_grad():
                net[0].weight.mul_(1.5)
        if deed == "frozen" and odd:
            net[0].weight.requires_grad_(requires_grad=False)
    rd.full_state_dict(net)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "ps", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("deed", DEEDS)
def test_ranks_with_parts_of_one_model_do_the_same(
    deed: str, strategy: str, axes: dict[str, int]
) -> None:
    def body(comm: Any) -> None:
        odd_one_out(comm, deed, strategy, axes)

    texts = refused(body, int(np.prod([*axes.values()])))
    assert "nothing" not in texts, texts


def test_axes_that_nobody_knows_are_refused() -> None:
    def body(comm: Any) -> None:
        rd.prepare(*small(), mesh=rd.Mesh(data=2, comm=comm))

    texts = refused(body, 2)
    assert all("does not know what its axis data divides" in text for text in texts), texts


KINDS = {
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("strategy", ["ddp", "ps", "zero1", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_there_before_a_plan_is_cut_with_the_parameters(
    kind: str, strategy: str
) -> None:
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()

    def steps(net: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    one, _ = small()
    own = KINDS[kind](one.parameters())
    steps(one, own, 4)

    def body(comm: Any) -> dict[str, Any]:
        net, _ = small()
        optimizer = KINDS[kind](net.parameters())
        steps(net, optimizer, 2)
        mesh = rd.Mesh(tp=2, comm=comm)
        net, optimizer = rd.prepare(net, optimizer, mesh=mesh, plan=PLAN, strategy=strategy)
        steps(net, optimizer, 2)
        return {name: value.numpy() for name, value in rd.full_state_dict(net).items()}

    for found in rd.run(body, 2, "threads"):
        for name, right in one.state_dict().items():
            np.testing.assert_allclose(found[name], right.numpy(), rtol=1e-12, err_msg=name)


def divided(kind: str, comm: Any) -> Any:
    """Return a model of which every rank of a communicator has a part."""
    if kind == "experts":
        experts = [seeded(lambda: torch.nn.Linear(6, 6)) for _ in range(4)]
        return rd.MoE(experts, rd.Router(6, 4), comm).double()
    net = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)))
    rd.apply_plan(net, {"0": "column", "1": "row"}, rd.Mesh(tp=comm.size, comm=comm))
    return net


@pytest.mark.parametrize("strategy", ["ddp", "ps", "zero1", "zero3"])
@pytest.mark.parametrize("kind", ["experts", "layers"])
def test_parts_of_a_model_are_prepared_with_their_mesh(kind: str, strategy: str) -> None:
    def body(comm: Any) -> None:
        net = divided(kind, comm)
        rd.prepare(net, adam(net.parameters()), comm=comm, strategy=strategy)

    texts = refused(body, 2)
    assert all("It needs the mesh" in text for text in texts), texts


@pytest.mark.parametrize("kind", ["experts", "layers"])
def test_a_copy_of_parts_knows_that_they_are_parts(kind: str) -> None:
    def body(comm: Any) -> bool:
        net = divided(kind, comm)
        twin, rows = copy.deepcopy(net), torch.ones(3, 6).double()
        return torch.equal(net(rows), twin(rows)) and [
            sharding_of(one) for one in twin.parameters()
        ] == [sharding_of(one) for one in net.parameters()]

    assert rd.run(body, 2, "threads") == [True, True]


def test_experts_of_other_code_are_refused() -> None:
    def body(comm: Any) -> None:
        ends = [torch.nn.LeakyReLU(0.1), torch.nn.LeakyReLU(0.2)]
        rd.MoE([torch.nn.Sequential(torch.nn.Linear(4, 4), end) for end in ends],
               rd.Router(4, 2), comm)  # fmt: skip

    texts = refused(body, 2)
    assert all("is not built like expert 0" in text for text in texts), texts


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 3}, {"dp": 2, "ep": 2}], ids=str)
def test_averaged_experts_need_not_divide_by_the_ranks(axes: dict[str, int]) -> None:
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(2)).double()

    experts = seeded(lambda: torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(5)))
    router = seeded(lambda: rd.Router(6, 5, top_k=2))

    def mixture(comm: Any) -> Any:
        return rd.MoE([*copy.deepcopy(experts)], copy.deepcopy(router), comm)

    one = mixture(None)
    own = adam(one.parameters())
    for _ in range(3):
        one(rows).square().mean().backward()
        own.step()
        own.zero_grad()

    def body(comm: Any) -> dict[str, Any]:
        mesh = rd.Mesh(comm=comm, **axes)
        net = mixture(mesh["ep"])
        net, optimizer = rd.prepare(net, adam(net.parameters()), mesh=mesh, strategy="ddp")
        for _ in range(3):
            net(rows.chunk(comm.size)[comm.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.numpy() for name, value in rd.full_state_dict(net).items()}

    for found in rd.run(body, int(np.prod([*axes.values()])), "threads"):
        for name, right in one.state_dict().items():
            np.testing.assert_allclose(found[name], right.numpy(), rtol=1e-11, err_msg=name)


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_what_a_model_sends_along_an_axis_of_data_is_counted_apart(axis: str) -> None:
    """Also where that axis has all ranks that the strategy acts on."""

    def body(comm: Any) -> Any:
        mesh = rd.Mesh(comm=comm, **{axis: 2})
        net = divided("experts", mesh["ep"]) if axis == "ep" else torch.nn.Linear(6, 6).double()
        net, optimizer = rd.prepare(net, adam(net.parameters()), mesh=mesh)
        rows = torch.ones(2, 8, 6).double()
        for _ in range(3):
            out: Any
            if axis == "cp":
                q = net(rd.shard_sequence(rows, mesh["cp"])).unsqueeze(1)
                out = rd.attention(q, q, q, comm=mesh["cp"])
            else:
                out = net(rows)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        mine = rd.ledger(net).entries[comm.rank]
        return mine.along, mine.sent, mine.sent_predicted

    for along, sent, predicted in rd.run(body, 2, "threads"):
        assert [*along] == [axis]
        assert along[axis] > 500
        assert abs(sent - predicted) <= 16


@pytest.mark.parametrize("odd", range(4))
def test_errors_count_ranks_as_the_mesh_does(odd: int) -> None:
    """One rank steps twice, and all name it by the number that the job knows it by."""

    def body(comm: rd.Communicator) -> str:
        mesh = rd.Mesh(dp=2, tp=2, comm=comm)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"0": "column", "1": "row"}
        model, prepared = rd.prepare(model, optimizer, mesh=mesh, plan=plan)
        with pytest.raises(CollectiveMismatch) as caught:
            for _ in range(2):
                prepared.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                prepared.step()
                if comm.rank == odd:
                    prepared.step()
        return str(caught.value)

    other = (odd + 2) % 4  # with other data, and the same part of the model
    for told in rd.run(body, 4, "threads"):
        assert f"rank {odd} in step 2" in told
        assert f"rank {other} in step 1" in told
