"""Optimizers of the user's own, and torch's with hooks and arguments: right, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402

nn = torch.nn
ONE_DEVICE = "one device"
SERVERS: dict[str, Any] = {
    "ps by servers": rd.ParameterServer(update="server"),
    "ps-async": "ps-async",
    "ps-ssp": "ps-ssp",
}
HERE: dict[str, Any] = {name: name for name in ("ddp", "zero1", "zero2", "zero3", "ps")}
EVERY = {**HERE, **SERVERS}


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


START = _start()  # once: random numbers are those of all threads
ROWS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def ready(comm: Any, strategy: Any, kind: Any, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(START)
    optimizer = kind(model.parameters())
    if strategy == ONE_DEVICE:
        return model, optimizer
    return rd.prepare(model, optimizer, comm=comm, strategy=strategy, **options)


def weights(model: Any, strategy: Any) -> Any:
    state = model.state_dict() if strategy == ONE_DEVICE else rd.full_state_dict(model)
    return torch.cat([one.detach().double().reshape(-1) for one in state.values()])


class Listing(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Keeps its parameters, and their momentum, in lists of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mine = {"all": [one for group in self.param_groups for one in group["params"]]}
        self.momentum = [torch.zeros_like(one) for one in self.mine["all"]]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
        for one, momentum in zip(self.mine["all"], self.momentum, strict=True):
            one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=self.param_groups[0]["lr"])


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Has another optimizer inside, which shares its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base: Any = torch.optim.SGD(vars(self)["param_groups"], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def train(comm: Any, strategy: Any, kind: Any, **options: Any) -> Any:
    model, optimizer = ready(comm, strategy, kind, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(ROWS.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
    return weights(model, strategy)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", HERE)
def test_lists_of_an_optimizer_are_right_where_it_steps_on_the_model(name: str, size: int) -> None:
    expected = train(None, ONE_DEVICE, Listing)
    for found in rd.run(lambda comm: train(comm, HERE[name], Listing), size, "threads"):
        assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_lists_of_an_optimizer_are_refused_where_it_steps_on_other_tensors(
    name: str, size: int
) -> None:
    def be_rank(comm: Any) -> None:
        for options in [{"precision": "bf16"}, *([{}] if name in SERVERS else [])]:
            with pytest.raises(InvalidArgumentError, match=r"Listing keeps the parameter .* mine"):
                ready(comm, EVERY[name], Listing, **options)

    rd.run(be_rank, size, "threads")


@pytest.mark.parametrize("name", EVERY)
def test_an_optimizer_inside_another(name: str) -> None:
    def be_rank(comm: Any) -> None:
        if name in SERVERS:
            with pytest.raises(InvalidArgumentError, match="in its attribute base"):
                ready(comm, EVERY[name], Wrapping)
            return
        expected = train(None, ONE_DEVICE, Wrapping)
        assert torch.allclose(train(comm, EVERY[name], Wrapping), expected, rtol=1e-12)
        rounded = train(comm, EVERY[name], Wrapping, precision="bf16")
        assert torch.allclose(rounded, expected, atol=0.02)
        assert not torch.allclose(rounded, weights(START, ONE_DEVICE), atol=0.02)

    rd.run(be_rank, 2, "threads")


# ---- hooks around the state


def called(comm: Any, strategy: Any) -> list[Any]:
    """What hooks of all four kinds see, and what they change."""
    model, optimizer = ready(comm, strategy, lambda params: torch.optim.SGD(params, momentum=0.9))
    seen: list[Any] = []

    def note(word: str, result: Any = None, *, mark: str = "") -> Any:
        def hook(own: Any, *states: Any) -> Any:
            assert own is optimizer
            seen.append((word, *(sorted(map(str, state)) for state in states)))
            for state in states if mark else ():
                state[mark] = state.get(mark, 0) + 1
            return result and result(*states)

        return hook

    optimizer.register_state_dict_pre_hook(note("before"))
    optimizer.register_state_dict_pre_hook(note("before all"), prepend=True)
    optimizer.register_state_dict_post_hook(note("after", mark="mine"))
    optimizer.register_state_dict_post_hook(note("wraps", lambda state: {"inside": state}))
    optimizer.register_load_state_dict_pre_hook(note("load after"))
    optimizer.register_load_state_dict_pre_hook(
        note("unwraps", lambda state: state["inside"]), prepend=True
    )
    optimizer.register_load_state_dict_post_hook(note("loaded"))
    model(ROWS).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    seen.append(sorted(state))
    seen.append(state["inside"]["state"][0]["momentum_buffer"].tolist())
    for one in state["inside"]["state"].values():
        one["momentum_buffer"].mul_(2)
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()["inside"]["state"][0]["momentum_buffer"]
    return [*seen, torch.as_tensor(again).tolist()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_hooks_around_the_state_are_called_as_on_one_device(name: str, size: int) -> None:
    if size > 1 and name in ("ps-async", "ps-ssp"):
        pytest.skip("what the state is depends on who comes first")
    expected = called(None, ONE_DEVICE)
    for found in rd.run(lambda comm: called(comm, EVERY[name]), size, "threads"):
        assert [one for one in found if not isinstance(one, list) or isinstance(one[0], str)] == [
            one for one in expected if not isinstance(one, list) or isinstance(one[0], str)
        ]
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, list) and not isinstance(other[0], str):
                assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_state_that_no_hook_mends_is_refused(name: str) -> None:
    def be_rank(comm: Any) -> None:
        _, optimizer = ready(comm, EVERY[name], torch.optim.SGD)
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {"other": state})
        states: list[Any] = [{"state": {}, "param_groups": []}, 3]
        for state in states:
            with pytest.raises(InvalidArgumentError, match="takes what state_dict"):
                optimizer.load_state_dict(state)

    rd.run(be_rank, 2, "threads")


# ---- arguments of the step


class Scaled(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Takes a factor."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.mul_(scale)
        return super().step(closure)


class Shorter(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Takes no closure."""

    def step(self) -> Any:
        return super().step()


class Forwarding(torch.optim.SGD):  # type: ignore[misc, name-defined]
    """Takes anything."""

    def step(self, *args: Any, **options: Any) -> Any:
        return super().step(*args, **options)


def stepped(comm: Any, strategy: Any) -> Any:
    found = []
    for kind, steps in (
        (Scaled, [((), {"scale": 0.5}), ((None, 0.25), {}), ((), {})]),
        (Shorter, [((), {})]),
        (Forwarding, [((), {})]),
    ):
        model, optimizer = ready(comm, strategy, kind)
        for args, options in steps:
            optimizer.zero_grad()
            model(ROWS).square().mean().backward()
            optimizer.step(*args, **options)
        found.append(weights(model, strategy))
    return torch.cat(found)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", HERE)
def test_arguments_of_a_step_are_handed_on(name: str, size: int) -> None:
    expected = stepped(None, ONE_DEVICE)
    for found in rd.run(lambda comm: stepped(comm, HERE[name]), size, "threads"):
        assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kind", [Scaled, Forwarding])
def test_a_closure_of_a_step_with_arguments(name: str, kind: Any) -> None:
    def train(comm: Any, strategy: Any) -> Any:
        model, optimizer = ready(comm, strategy, kind)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(ROWS).square().mean()
            loss.backward()
            return loss

        model(ROWS).square().mean().backward()
        options = {"scale": 0.5} if kind is Scaled else {}
        return optimizer.step(closure, **options).item(), weights(model, strategy)

    loss, expected = train(None, ONE_DEVICE)
    for found in rd.run(lambda comm: train(comm, HERE[name]), 2, "threads"):
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(found[1], expected, rtol=1e-12)


@pytest.mark.parametrize("name", SERVERS)
def test_arguments_of_a_step_that_servers_take_are_refused(name: str) -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = ready(comm, SERVERS[name], Scaled)
        model(ROWS).square().mean().backward()
        with pytest.raises(InvalidArgumentError, match=r"Scaled.step got scale.*parameter server"):
            optimizer.step(scale=0.5)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("name", EVERY)
def test_arguments_that_a_step_does_not_take_are_refused(name: str) -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = ready(comm, EVERY[name], torch.optim.SGD)
        model(ROWS).square().mean().backward()
        with pytest.raises(InvalidArgumentError, match=r"SGD.step.*'scale'"):
            optimizer.step(scale=0.5)
        with pytest.raises(InvalidArgumentError, match="step takes a closure"):
            optimizer.step(0.5)

    rd.run(be_rank, 2, "threads")


def test_ranks_that_step_with_other_arguments_are_told() -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = ready(comm, "ddp", Scaled)
        for _ in range(2):
            optimizer.zero_grad()
            model(ROWS).square().mean().backward()
            optimizer.step(scale=0.5 + comm.rank)

    with pytest.raises(CollectiveMismatch, match=r"step\(scale=[01]\.5\)"):
        rd.run(be_rank, 2, "threads")


# ---- gradients, and torch.compile


@pytest.mark.parametrize("name", [*HERE, "ps-async", "ps-ssp"])
def test_gradients_may_have_a_graph(name: str) -> None:
    def train(comm: Any, strategy: Any) -> Any:
        model, optimizer = ready(comm, strategy, torch.optim.SGD)
        for _ in range(3):
            optimizer.zero_grad()
            model(ROWS).square().mean().backward()
            for one in model.parameters():
                one.grad.add_(one, alpha=0.1)  # without torch.no_grad()
            optimizer.step()
        return weights(model, strategy)

    expected = train(None, ONE_DEVICE)
    (found,) = rd.run(lambda comm: train(comm, EVERY[name]), 1, "threads")
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_compiled_step_runs_as_it_is(name: str) -> None:
    def train(comm: Any, strategy: Any) -> Any:
        model, optimizer = ready(comm, strategy, lambda own: torch.optim.SGD(own, momentum=0.9))
        step = optimizer.step
        if strategy != ONE_DEVICE:
            step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            optimizer.zero_grad()
            model(ROWS).square().mean().backward()
            step()
        return weights(model, strategy)

    expected = train(None, ONE_DEVICE)
    size = 1 if name in ("ps-async", "ps-ssp") else 2
    for found in rd.run(lambda comm: train(comm, EVERY[name]), size, "threads"):
        assert torch.allclose(found, expected, rtol=1e-12)
