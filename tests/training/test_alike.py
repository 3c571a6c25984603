"""What is done between backward and step is done by all ranks alike, or all of them are told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")


def trained(stacks: Any, strategy: str, act: Callable[..., None], size: int = 2) -> list[Any]:
    """Train two steps, with something done to model and optimizer between backward and step."""

    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> Any:
        model = copy.deepcopy(whole)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        try:
            for step in range(2):
                loss = stacks.loss_on(comm, model, step, torch.float64)
                if step == 0:
                    loss.backward(retain_graph=True)
                    act(comm.rank, model, own, loss)
                else:
                    loss.backward()
                own.step()
                own.zero_grad()
        except (CollectiveMismatch, InvalidArgumentError) as error:
            return type(error).__name__, str(error)
        return {name: one.clone() for name, one in rd.full_state_dict(model).items()}

    return rd.run(be_rank, size, "threads")


def scaled(_: int, model: Any, *__: Any) -> None:
    next(model.parameters()).grad.mul_(2)


def zeroed(_: int, model: Any, *__: Any) -> None:
    model.last.bias.grad.zero_()


def let_go(_: int, model: Any, *__: Any) -> None:
    model.first.bias.grad = None


def assigned(_: int, model: Any, *__: Any) -> None:
    model.first.bias.grad = torch.ones_like(model.first.bias.detach())


def cut(_: int, model: Any, *__: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


EDITS = (scaled, zeroed, let_go, assigned, cut)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("edit", EDITS, ids=lambda one: one.__name__)
def test_what_one_rank_does_to_gradients_all_are_told(
    stacks: Any, strategy: str, edit: Callable[..., None]
) -> None:
    def by_one(rank: int, *rest: Any) -> None:
        if rank == 1:
            edit(rank, *rest)

    for found in trained(stacks, strategy, by_one):
        assert found[0] == "CollectiveMismatch"
        assert "did different things to their gradients" in found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("edit", EDITS, ids=lambda one: one.__name__)
def test_what_all_ranks_do_is_one_device(
    stacks: Any, strategy: str, edit: Callable[..., None]
) -> None:
    expected = trained(stacks, "ddp", edit, 1)[0]
    for found in trained(stacks, strategy, edit):
        for name, one in expected.items():
            assert torch.allclose(found[name], one, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_each_rank_computed_for_itself_are_told(stacks: Any, strategy: str) -> None:
    """Whoever sets `.grad` by hand sets it to that of the whole batch."""

    def by_hand(_: int, model: Any, __: Any, loss: Any) -> None:
        params = [model.last.weight, model.last.bias]
        for one, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            one.grad = grad

    if strategy == "zero3":  # whose parameters in a graph are others
        pytest.skip("autograd.grad of absent parameters is another law's")
    for found in trained(stacks, strategy, by_hand):
        assert found[0] == "CollectiveMismatch"
        assert "did different things to their gradients" in found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_inside_backward_is_refused(stacks: Any, strategy: str) -> None:
    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> str:
        model = copy.deepcopy(whole)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda _: own.step())
        with pytest.raises(InvalidArgumentError, match="inside backward") as error:
            stacks.loss_on(comm, model, 0, torch.float64).backward()
        return str(error.value)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_that_have_other_parameters_are_refused(stacks: Any, strategy: str) -> None:
    def moved(optimizers: Any) -> None:
        one, two = optimizers
        one.add_param_group({"params": two.param_groups.pop()["params"]})

    def removed(optimizers: Any) -> None:
        optimizers[1].param_groups[0]["params"].pop()

    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any, act: Callable[[Any], None]) -> None:
        model = copy.deepcopy(whole)
        parts = [[*model.first.parameters(), *model.blocks.parameters()],
                 list(model.last.parameters())]  # fmt: skip
        owns = [torch.optim.SGD(part, lr=0.1) for part in parts]
        model, owns = rd.prepare(model, owns, strategy=strategy, comm=comm)
        stacks.loss_on(comm, model, 0, torch.float64).backward()
        act(owns)
        with pytest.raises(InvalidArgumentError, match="other parameters than at prepare"):
            for own in reversed(owns):
                own.step()

    for act in (moved, removed):
        rd.run(be_rank, 2, "threads", (act,))


class Breaks(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Steps on one parameter after the other, and raises at the third of its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0

    def step(self, closure: Any = None) -> None:
        del closure
        for one in self.param_groups[0]["params"]:
            self.count += 1
            if self.count == 3:
                raise RuntimeError("in the middle")
            if one.grad is not None:
                one.data.sub_(one.grad, alpha=0.1)


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one != "ps"])
def test_a_step_that_raises_has_done_what_it_does_on_one_device(stacks: Any, strategy: str) -> None:
    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> Any:
        model = copy.deepcopy(whole)
        model, own = rd.prepare(model, Breaks(model.parameters()), strategy=strategy, comm=comm)
        for step in range(3):
            stacks.loss_on(comm, model, step, torch.float64).backward()
            try:
                own.step()
            except RuntimeError:
                assert step == 0
            own.zero_grad()
        return {name: one.clone() for name, one in rd.full_state_dict(model).items()}

    expected = rd.run(be_rank, 1, "threads")[0]
    for found in rd.run(be_rank, 3, "threads"):
        for name, one in expected.items():
            assert torch.allclose(found[name], one, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_somebody_keeps_stay_as_they_were(stacks: Any, strategy: str) -> None:
    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(whole)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        stacks.loss_on(comm, model, 0, torch.float64).backward()
        kept = [one.grad for one in model.parameters()]
        before = [one.clone() for one in kept]
        own.step()
        own.zero_grad()
        stacks.loss_on(comm, model, 1, torch.float64).backward()
        for one, two, now in zip(kept, before, model.parameters(), strict=True):
            assert bool((one == two).all())
            assert not bool((now.grad == two).all())
        own.step()

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["load", "copy", "data"])
def test_what_one_rank_writes_into_the_model_all_are_told(
    stacks: Any, strategy: str, how: str
) -> None:
    def write(rank: int, model: Any, *_: Any) -> None:
        if rank != 1:
            return
        values = torch.ones(3, dtype=torch.float64)
        with torch.no_grad():
            if how == "load":
                model.last.load_state_dict({"bias": values}, strict=False)
            elif how == "copy":
                model.last.bias.copy_(values)
            else:
                model.last.bias.data = values

    for found in trained(stacks, strategy, write):
        assert found[0] == "CollectiveMismatch"
        assert "last.bias" in found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("where", ["model", "groups"])
def test_gradients_set_by_hand_count_as_they_are(strategy: str, precision: str, where: str) -> None:
    def be_rank(comm: Any) -> float:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        own: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm, precision=precision)
        own.scale(model(torch.ones(2, 2)).float().mean() / 8).backward()
        target = model.weight if where == "model" else own.param_groups[0]["params"][0]
        target.grad = torch.full((1, 2), 0.5, dtype=target.dtype)
        own.step()
        return float(rd.full_state_dict(model)["weight"][0, 0])

    assert rd.run(be_rank, 2, "threads") == [-0.5, -0.5]


@pytest.mark.parametrize("strategy", ["ddp", "ps"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gradients_of_masters_are_not_there_before_the_step(strategy: str, precision: str) -> None:
    """Clipping in groups would clip nothing; what says so is the gradient itself."""

    def be_rank(comm: Any) -> float:
        model = torch.nn.Linear(2, 1, bias=False)
        own: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm, precision=precision)
        for _ in range(2):
            own.scale(model(torch.ones(2, 2)).float().mean() / 8).backward()
            with pytest.raises(InvalidArgumentError, match=r"master weights of weight.*clip_grad"):
                torch.nn.utils.clip_grad_norm_(own.param_groups[0]["params"], 0.1)
            own.step()
            own.zero_grad()
        return float(rd.full_state_dict(model)["weight"].sum())

    assert len(set(rd.run(be_rank, 2, "threads"))) == 1


def test_options_that_are_objects_are_the_same_on_every_rank(stacks: Any) -> None:
    whole = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> int:
        model = copy.deepcopy(whole)
        own = torch.optim.SGD([{"params": list(model.parameters()), "rule": object(),
                                "when": lambda step: step > 1}], lr=0.1)  # fmt: skip
        rd.prepare(model, own, comm=comm)
        return int(comm.rank)

    assert rd.run(be_rank, 2, "threads") == [0, 1]


def swapped_data(_: int, model: Any, *__: Any) -> None:
    one, two = model.blocks[0].up.weight, model.blocks[1].up.weight
    one.data, two.data = two.data, one.data


def own_average(_: int, model: Any, *__: Any) -> None:
    """As targets of reinforcement learning follow: their `.data` is a mixture."""
    target = copy.deepcopy(model.last.bias.detach() * 0)
    for _ in range(2):
        target.data = 0.5 * target.data + 0.5 * model.last.bias.data
    with torch.no_grad():
        model.last.bias.add_(target.full() if hasattr(target, "full") else target)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("edit", [swapped_data, own_average], ids=lambda one: one.__name__)
def test_data_that_is_assigned_is_one_device(
    stacks: Any, strategy: str, edit: Callable[..., None]
) -> None:
    expected = trained(stacks, "ddp", edit, 1)[0]
    for found in trained(stacks, strategy, edit):
        for name, one in expected.items():
            assert torch.allclose(found[name], one, rtol=1e-12, atol=1e-13), name


def backward_of(model: Any, _: Any) -> None:
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()


def step_of(_: Any, optimizer: Any) -> None:
    optimizer.step()


def clip_of(_: Any, optimizer: Any) -> None:
    optimizer.clip_grad_norm_(1.0)


def state_of(model: Any, _: Any) -> None:
    rd.full_state_dict(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("act", [backward_of, step_of, clip_of, state_of])
def test_models_of_one_form_are_told_apart(strategy: str, size: int, act: Any) -> None:
    """The last rank comes to them in the other order: what they exchange would be mixed."""

    def be_rank(comm: Any) -> None:
        pairs = []
        for _ in range(2):
            model = torch.nn.Linear(3, 1, bias=False).double()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs.append(rd.prepare(model, sgd, strategy=strategy, comm=comm))
        for pair in pairs if act is not backward_of else ():
            backward_of(*pair)
        for pair in pairs[:: 1 if comm.rank < size - 1 else -1]:
            act(*pair)
        for pair in pairs:
            state_of(*pair)

    if strategy == "ddp" and act is clip_of:  # nothing is exchanged for it
        rd.run(be_rank, size, "threads")
        return
    with pytest.raises(CollectiveMismatch, match="label=2"):
        rd.run(be_rank, size, "threads")


def test_parameters_that_move_between_groups(  # noqa: C901 - two ways to move them
) -> None:
    """The options of their new group count, as on one device; servers that update refuse it."""

    def split(groups: Any) -> None:
        params = groups[0]["params"]
        groups[0]["params"], rest = params[:1], params[1:]
        groups.append({**groups[0], "params": rest, "lr": 0.5})

    def swap(groups: Any) -> None:
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]

    torch.manual_seed(0)
    start = torch.nn.Linear(3, 2).double()

    def train(act: Callable[[Any], None], comm: Any = None, strategy: Any = None) -> Any:
        model = copy.deepcopy(start)
        groups: list[Any] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}]
        own: Any = torch.optim.SGD(groups if act is swap else model.parameters(), lr=0.1)
        if comm is not None:
            model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        for step in range(2):
            model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            if step:
                act(own.param_groups)
            own.step()
            own.zero_grad()
        return model.state_dict() if comm is None else rd.full_state_dict(model)

    def be_rank(comm: Any, act: Callable[[Any], None], strategy: Any) -> Any:
        try:
            return {name: one.clone() for name, one in train(act, comm, strategy).items()}
        except InvalidArgumentError as error:
            return str(error)

    for act in (split, swap):
        expected = train(act)
        for strategy in STRATEGIES:
            for found in rd.run(be_rank, 2, "threads", (act, strategy)):
                for name, one in expected.items():
                    torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)
        server = rd.ParameterServer(update="server")
        for found in rd.run(be_rank, 2, "threads", (act, server)):
            assert "at prepare, and the server has them there" in found


def test_what_torch_jit_has_compiled_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))

    def be_rank(comm: Any) -> None:
        for model, name in ((inner, "the model"), (torch.nn.Sequential(inner), "the module 0")):
            own = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(InvalidArgumentError, match=f"{name}, which torch.jit has compiled"):
                rd.prepare(model, own, comm=comm)

    rd.run(be_rank, 2, "threads")
