"""Programs that clip, log, average, couple and operate on parameters by themselves, under ZeRO."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402 - only with torch

import roundelay as rd  # noqa: E402
from roundelay.errors import InvalidArgumentError  # noqa: E402

nn = torch.nn

WAYS = {"zero1": (2,), "zero2": (3,), "zero3": (1, 2, 3)}  # and on how many ranks
DTYPE = torch.float64


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)).to(DTYPE)


START = _start()


class Place:
    """What a program sees of where it runs: one device, or a rank."""

    def __init__(self, model: Any, optimizer: Any, comm: Any = None) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm

    def loss(self, step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(12, 3, generator=generator, dtype=DTYPE)
        if self.comm is not None:
            rows = rows.tensor_split(self.comm.size)[self.comm.rank]
        return self.model(rows.to(self.model[0].weight.dtype)).square().mean()

    @property
    def shown(self) -> list[Any]:
        """The parameters in the optimizer's groups."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    @property
    def own(self) -> list[Any]:
        """The parameters of the model."""
        return list(self.model.parameters())

    def train(self, steps: range, between: Any = None, after: Any = None) -> None:
        for step in steps:
            self.loss(step).backward()
            if between is not None:
                between()
            self.optimizer.step()
            if after is not None:
                after()
            self.optimizer.zero_grad()


Program = Callable[[Place], None]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


# ---- gradients


def clip_the_groups(at: Place) -> None:
    at.train(range(3), lambda: nn.utils.clip_grad_norm_(at.shown, 0.01))


def clip_the_model(at: Place) -> None:
    def clip() -> None:
        nn.utils.clip_grad_norm_(at.own, 0.01, norm_type=math.inf, error_if_nonfinite=True)
        nn.utils.clip_grad_value_(at.own, 0.005)

    at.train(range(3), clip)


def clip_by_hand(at: Place) -> None:
    def clip() -> None:
        total = sum(one.grad.data.norm(2).item() ** 2 for one in at.shown) ** 0.5
        for one in at.shown:
            one.grad.data.mul_(0.01 / total)

    at.train(range(3), clip)


def clip_by_row(at: Place) -> None:
    def clip() -> None:
        for one in at.own:
            most = 0.01 * one.detach().norm(dim=-1, keepdim=True).clamp_(min=1e-3)
            norm = one.grad.norm(dim=-1, keepdim=True)
            one.grad.copy_(torch.where(norm < most, one.grad, one.grad * (most / norm)))

    at.train(range(3), clip)


def clip_in_a_hook(at: Place) -> None:
    def clip(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.01)

    at.optimizer.register_step_pre_hook(clip)
    at.train(range(3))


def clip_in_a_global_hook(at: Place) -> None:
    def clip(optimizer: Any, *_: Any) -> None:
        if optimizer is at.optimizer:
            nn.utils.clip_grad_norm_(at.shown, 0.01)

    handle = register_optimizer_step_pre_hook(clip)
    try:
        at.train(range(3))
    finally:
        handle.remove()


def clip_within_a_closure(at: Place) -> None:
    def closure() -> Any:
        at.optimizer.zero_grad()
        loss = at.loss(0)
        loss.backward()
        nn.utils.clip_grad_norm_(at.shown, 0.01)
        return loss

    for _ in range(2):
        at.optimizer.step(closure)


def centre(at: Place) -> None:
    def centred() -> None:
        for one in at.own:
            if one.grad.dim() > 1:
                one.grad.add_(-one.grad.mean(dim=1, keepdim=True))

    at.train(range(3), centred)


def replace(at: Place) -> None:
    def other() -> None:
        for one, two in zip(at.own, at.shown, strict=True):
            one.grad = one.grad * 0.3 + 0.01
            two.grad = None if two.grad is None else two.grad.sign() * two.grad.abs().sqrt()

    at.train(range(2), other)


def replace_in_groups(at: Place) -> None:
    def other() -> None:
        for one in at.shown:
            one.grad = one.grad.clamp(-0.01, 0.01) + 0.001 * one.detach()

    at.train(range(3), other)


def drop_some(at: Place) -> None:
    def drop() -> None:
        for one in at.shown[::2]:
            one.grad = None

    at.train(range(3), drop)


def drop_all_by_the_groups(at: Place) -> None:
    for step in range(3):
        at.loss(step + 10).backward()
        for one in at.shown:
            one.grad = None
        at.loss(step).backward()
        at.optimizer.step()
        for one in at.shown:
            one.grad = None


def change_and_add(at: Place) -> None:
    for step in range(2):
        at.loss(step + 10).backward()
        for number, one in enumerate(at.own):
            if number % 2:
                one.grad = one.grad * 2
            else:
                one.grad.mul_(2)
        at.loss(step).backward()
        at.optimizer.step()
        at.optimizer.zero_grad()


def keep_old_ones(at: Place) -> None:
    """What the user still holds of a gradient stays as it was."""
    at.loss(0).backward()
    old = [one.grad for one in at.own]
    views = [one.grad.view(-1) for one in at.shown]
    at.optimizer.zero_grad()
    at.loss(1).backward()
    for one, before, view in zip(at.own, old, views, strict=True):
        one.grad.add_(before).view(-1).add_(view, alpha=0.5)
    at.optimizer.step()


def hand_around(at: Place) -> None:
    """What is assigned is what it was, though the next assignment is about to change it."""
    weights = [one for one in at.own if one.shape == at.own[3].shape]
    for step in range(3):
        at.loss(step).backward()
        found = [one.grad for one in weights]
        for one, two in zip(weights, [*found[1:], found[0]], strict=True):
            one.grad = two
        if step == 1:
            at.loss(step + 10).backward()
        at.optimizer.step()
        for one, two in zip(weights, found if step != 1 else (), strict=step != 1):
            one.grad = two * 0.5
        at.optimizer.step()
        at.optimizer.zero_grad()


def choose_by_set(at: Place) -> None:
    """Parameters of the groups are found among those of the model, and the other way round."""
    chosen, names = set(at.own[:2]), {one: name for name, one in at.model.named_parameters()}
    assert [names[one] for one in at.shown] == [name for name, _ in at.model.named_parameters()]
    assert set(at.own) == set(at.shown)
    assert all(one in set(at.shown) for one in at.own)
    assert not any(one in chosen for one in at.shown[2:])
    assert all((one == two).all() for one, two in zip(at.own, at.shown, strict=True))
    with torch.no_grad():
        for one in at.shown:
            one.mul_(0.5 if one in chosen else 0.9)
    at.train(range(2))
    assert {names[one] for one in at.optimizer.state} == set(names.values())


def look_after_the_step(at: Place) -> None:
    norms = []
    at.train(
        range(2), None, lambda: norms.append(nn.utils.get_total_norm([one.grad for one in at.own]))
    )
    with torch.no_grad():
        at.shown[0].mul_(norms[0]).add_(norms[1])


# ---- weights


def penalty(at: Place) -> None:
    for step in range(3):
        loss = at.loss(step) + 0.1 * sum(one.square().sum() for one in at.own)
        (loss + 0.05 * sum(one.norm() for one in at.shown)).backward()
        at.optimizer.step()
        at.optimizer.zero_grad()


#: What a loss may make of a trained parameter and of tensors that are divided like it.
PENALTIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "product": lambda p, old, _: (p * old).sum(),
    "other way": lambda p, old, _: (old * p).sum(),
    "difference": lambda p, old, _: (p - old).square().sum(),
    "norm": lambda p, old, _: (p - old - 1).norm(),
    "fisher": lambda p, old, fisher: (fisher * (p - old) ** 2).sum(),
    "cosine": lambda p, _, fisher: nn.functional.cosine_similarity(p.view(-1), fisher.view(-1), 0),
    "mean": lambda p, old, _: nn.functional.mse_loss(p, old),
    "where": lambda p, old, fisher: torch.where(fisher > 0.01, p, old).square().sum(),
    "lerp": lambda p, old, _: torch.lerp(p, old, 0.3).square().sum(),
    "matrix": lambda p, old, _: (p.view(-1)[None] @ old.view(-1, 1)).sum(),
    "views": lambda p, old, _: (p[0] * old[-1]).sum(),
    "in place": lambda p, old, fisher: (torch.zeros_like(old).add_(p).mul_(fisher)).sum(),
    "a list": lambda p, old, _: sum(torch._foreach_mul([p], [old])).sum(),
}


def gradients_of(at: Place) -> dict[str, Any]:
    at.loss(0).backward()
    old = [one.detach().clone() * 0.9 for one in at.shown]
    fisher = [one.grad.detach() ** 2 for one in at.own]
    found = {}
    for of, them in (("own", at.own), ("shown", at.shown)):
        for name, penalty in PENALTIES.items():
            more = [penalty(*each) for each in zip(them, old, fisher, strict=True)]
            at.optimizer.zero_grad()
            (at.loss(1) + 0.1 * sum(more)).backward()
            found[f"{of} {name}"] = [np.array(one.grad.tolist()) for one in at.own]
    for name, hook in HOOKS.items():
        at.optimizer.zero_grad()
        handles = [one.register_hook(partial(hook, two))
                   for one, two in zip(at.own, old, strict=True)]  # fmt: skip
        at.loss(1).backward()
        found[name] = [np.array(one.grad.tolist()) for one in at.own]
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_penalties_on_what_is_divided_have_one_device_s_gradients(way: str) -> None:
    """What flows back to a parameter is a whole gradient, which is summed up over the ranks."""

    model = copy.deepcopy(START)
    expected = gradients_of(Place(model, sgd(model)))

    def be_rank(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(START)
        return gradients_of(Place(*rd.prepare(mine, sgd(mine), strategy=way, comm=comm), comm))

    for found in rd.run(be_rank, WAYS[way][-1], "threads"):
        for name, each in expected.items():
            for one, two in zip(each, found[name], strict=True):
                np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-12, err_msg=name)


#: What a hook may make of a gradient on its way, and of a tensor that is divided.
HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, grad: grad + 0.5 * old,
    "mask": lambda old, grad: grad * (old > 0),
    "instead": lambda old, _: old * 2,
    "written": lambda old, grad: old.clone().add_(old).mul(grad),
}


def average_of_the_groups(at: Place) -> None:
    mean = [one.detach().clone() for one in at.shown]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def follow() -> None:
        for one, two in zip(mean, at.shown, strict=True):
            one.lerp_(two, 0.1)

    at.train(range(3), None, follow)
    with torch.no_grad():
        for one, two in zip(mean, at.shown, strict=True):
            two.copy_(one)
    at.train(range(3, 5))


def average_of_the_model(at: Place) -> None:
    mean = [one.data.clone() for one in copy.deepcopy(START).parameters()]

    def follow() -> None:
        for one, two in zip(mean, at.own, strict=True):
            one.mul_(0.9).add_(two.data, alpha=0.1)

    at.train(range(3), None, follow)
    for one, two in zip(mean, at.own, strict=True):
        two.data.copy_(one)
    at.train(range(3, 5))


def decay(at: Place) -> None:
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def shrink() -> None:
        for one in at.shown:
            one.mul_(0.9)
        for one in at.own:
            one.clamp_(-0.3, 0.3)

    at.train(range(3), None, shrink)


def surgery(at: Place) -> None:
    at.train(range(2))
    with torch.no_grad():
        for one, two in zip(at.own, at.shown, strict=True):
            one.data[0] = 0.1
            two[-1].mul_(0.5)
            if one.dim() > 1:
                one[:, 1] = two[:, 0] * 2
                one.view(-1)[2:5] += 0.2
    at.train(range(2, 4))


def by_vector(at: Place) -> None:
    at.train(range(1))
    vector = nn.utils.parameters_to_vector(at.own).detach()
    nn.utils.vector_to_parameters(vector * 0.9, at.own)
    with torch.no_grad():
        at.shown[0].add_(0.1)
    at.train(range(1, 3))


# ---- optimizers


def state(at: Place) -> None:
    def halve() -> None:
        kept = at.optimizer.state
        assert len(kept) == len(at.shown)
        assert all(one in kept for one in at.shown)
        for one, two in zip(at.own, at.shown, strict=True):
            kept[one]["exp_avg"].mul_(0.5)
            kept[two]["exp_avg_sq"] = kept[two]["exp_avg_sq"] * 2 + kept[two]["step"] * 0.001

    at.train(range(3), None, halve)


class Sam(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Sharpness-aware minimisation, as it is found in many a repository."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups: Any = self.base.param_groups

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def first_step(self) -> None:
        them = [one for group in self.param_groups for one in group["params"]]
        norm = torch.norm(torch.stack([one.grad.norm(p=2) for one in them]), p=2)
        for one in them:
            self.state[one]["old"] = one.data.clone()
            one.add_(one.grad * (0.05 / (norm + 1e-12)).to(one))
        self.zero_grad()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def second_step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.data = self.state[one]["old"]
        self.base.step()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def sam(at: Place) -> None:
    for step in range(2):
        at.loss(step).backward()
        at.optimizer.first_step()
        at.loss(step).backward()
        at.optimizer.second_step()
        at.optimizer.zero_grad()


def sam_by_closure(at: Place) -> None:
    for step in range(2):
        at.loss(step).backward()
        at.optimizer.step(lambda step=step: at.loss(step).backward())
        at.optimizer.zero_grad()


class Lamb(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Clips by the norm of all gradients, and steps by a trust ratio for each parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        them = [one for group in self.param_groups for one in group["params"]]
        total = torch.zeros(1, dtype=torch.float64)
        for one in them:
            total.add_(one.grad.pow(2).sum())
        for one in them:
            grad = one.grad.div(total.sqrt().clamp(min=0.1)).to(one.dtype)
            kept = self.state[one]
            if len(kept) == 0:
                kept["step"], kept["m"], kept["v"] = 0, torch.zeros_like(one), torch.zeros_like(one)
            kept["step"] += 1
            kept["m"].mul_(0.9).add_(grad, alpha=0.1)
            kept["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
            update = kept["m"] / (1 - 0.9 ** kept["step"]) / (kept["v"].sqrt() + 1e-6)
            one.data.add_(update, alpha=-0.01 * (one.norm() / update.norm()).item())


def steps(at: Place) -> None:
    at.train(range(3))
    kept = copy.deepcopy(at.optimizer.state_dict())
    at.train(range(3, 4))
    at.optimizer.load_state_dict(kept)
    at.train(range(4, 6))


def by_search(at: Place) -> None:
    def closure() -> Any:
        at.optimizer.zero_grad()
        loss = at.loss(0)
        loss.backward()
        return loss if at.comm is None else at.comm.all_reduce(loss.detach().clone(), "avg")

    for _ in range(2):
        at.optimizer.step(closure)


def matrices(model: Any) -> Any:
    for one in model.parameters():
        one.requires_grad_(requires_grad=one.dim() == 2)
    return torch.optim.Muon([one for one in model.parameters() if one.requires_grad], lr=0.01)


PROGRAMS: dict[Program, Callable[[Any], Any]] = {
    **dict.fromkeys([
        clip_the_groups, clip_the_model, clip_by_hand, clip_by_row, clip_in_a_hook,
        clip_in_a_global_hook, clip_within_a_closure, centre, replace_in_groups, drop_some,
        drop_all_by_the_groups, change_and_add, keep_old_ones, hand_around,
        choose_by_set, look_after_the_step, penalty,
        average_of_the_groups, average_of_the_model, decay, surgery, by_vector,
    ], sgd),
    state: adam,
    sam: lambda model: Sam(model.parameters(), torch.optim.AdamW, lr=0.01),
    sam_by_closure: lambda model: Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Lamb": lambda model: Lamb(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "Muon": matrices,
}


def on_one_device(program: Program, optimizer: Any) -> dict[str, Any]:
    model = copy.deepcopy(START)
    program(Place(model, optimizer(model)))
    return {key: one.detach().numpy().copy() for key, one in model.state_dict().items()}


def on_ranks(way: str, size: int, program: Program, optimizer: Any, **options: Any) -> Any:
    def be_rank(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(START)
        mine, own = rd.prepare(mine, optimizer(mine), strategy=way, comm=comm, **options)
        program(Place(mine, own, comm))
        return {key: one.double().numpy().copy() for key, one in rd.full_state_dict(mine).items()}

    return rd.run(be_rank, size, "threads")


def assert_one_device(
    way: str, size: int, program: Program, optimizer: Any, close: float = 1e-12, **options: Any
) -> None:
    expected = on_one_device(program, optimizer)
    for found in on_ranks(way, size, program, optimizer, **options):
        for key, one in expected.items():
            scale = np.abs(one).max()
            np.testing.assert_allclose(found[key], one, rtol=0, atol=close * scale, err_msg=key)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_programs_are_one_device_s(way: str, program: Program) -> None:
    for size in WAYS[way]:
        assert_one_device(way, size, program, PROGRAMS[program])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_optimizers_that_need_more_than_elements_are_one_device_s(way: str, kind: str) -> None:
    for size in WAYS[way]:
        assert_one_device(way, size, steps, OPTIMIZERS[kind])


@pytest.mark.parametrize("way", WAYS)
def test_a_line_search_is_one_device_s(way: str) -> None:
    def lbfgs(model: Any) -> Any:
        return torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
        )

    assert_one_device(way, 3, by_search, lbfgs)


@pytest.mark.parametrize("way", WAYS)
def test_in_bf16_they_reach_the_masters(way: str) -> None:
    """Within the rounding of bf16; what is not exact there is refused."""
    loose = {program: make for program, make in PROGRAMS.items()
             if program not in (change_and_add, clip_within_a_closure, hand_around)}  # fmt: skip
    for program, optimizer in loose.items():
        assert_one_device(way, 2, program, optimizer, close=0.05, precision="bf16")
    with pytest.raises(InvalidArgumentError, match="zero_grad"):
        on_ranks(way, 1, change_and_add, sgd, precision="bf16")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_complete_is_not_looked_at(way: str) -> None:
    """Weights of losses are known after the last pass."""

    def program(at: Place) -> None:
        with rd.accumulate(at.model):
            rd.backward(at.loss(0), weight=2)
        with pytest.raises(InvalidArgumentError, match=r"0\.weight is not complete"):
            if way == "zero1":  # has the gradient of this rank
                raise InvalidArgumentError("0.weight is not complete")
            at.shown[0].grad.norm()
        rd.backward(at.loss(1), weight=3)
        assert at.shown[0].grad.norm() > 0

    on_ranks(way, 2, program, sgd)


class Keeper(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Keeps views of gradients."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for one in (one for group in self.param_groups for one in group["params"]):
            self.state[one].update({
                "all": one.grad, "first": one.grad[0], "flat": one.grad.view(-1), "T": one.grad.T,
            })  # fmt: skip


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("way", WAYS)
def test_views_in_the_state_come_back_in_their_own_shapes(way: str) -> None:
    def kept(at: Place) -> Any:
        at.loss(0).backward()
        at.optimizer.step()
        found = at.optimizer.state_dict()["state"]
        return [[np.array(one[name].tolist()) for name in ("all", "first", "flat", "T")]
                for _, one in sorted(found.items())]  # fmt: skip

    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(START)
        own = Keeper(mine.parameters(), {})
        return kept(Place(*rd.prepare(mine, own, strategy=way, comm=comm), comm))

    model = copy.deepcopy(START)
    expected = kept(Place(model, Keeper(model.parameters(), {})))
    for found in rd.run(be_rank, WAYS[way][-1], "threads"):
        for each, mine in zip(expected, found, strict=True):
            for one, two in zip(each, mine, strict=True):
                np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_torch_s_scaler_is_right(way: str) -> None:
    """Its division and its search for overflows see all gradients."""

    def program(at: Place) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            scaler.scale(at.loss(step)).backward()
            if step == 1:
                at.shown[-1].grad[1].fill_(math.inf)  # which one rank has
            scaler.unscale_(at.optimizer)
            nn.utils.clip_grad_norm_(at.shown, 0.01)
            scaler.step(at.optimizer)
            scaler.update()
            at.optimizer.zero_grad()
        assert scaler.get_scale() == 4.0

    assert_one_device(way, 3, program, sgd)
