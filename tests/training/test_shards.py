"""What a strategy hands out of divided tensors is the whole one's in all that is done with it.

Parameters in the optimizer's groups, parameters of the model, gradients of both, and the state.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402
from roundelay.training.shards.shard import Shard  # noqa: E402

nn = torch.nn

NAMES = ["zero1", "zero2", "zero3"]
SIZES = (1, 2, 3)
DTYPE = torch.float64


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(DTYPE)


START = _start()
INPUT = torch.linspace(-1, 1, 18, dtype=DTYPE).view(6, 3)
OTHER = torch.cos(torch.arange(20, dtype=DTYPE)).view(4, 5)


def loss_of(model: Any, comm: Any = None) -> Any:
    rows = INPUT if comm is None else INPUT.tensor_split(comm.size)[comm.rank]
    return model(rows).square().mean()


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


# ---- operations, on the second layer's weight, which is divided in the middle of a row

Operation = Callable[[Any], Any]


def changed(how: Callable[[Any], Any]) -> Operation:
    """Return what a copy has become."""

    def change(w: Any) -> Any:
        mine = w.detach().clone()
        how(mine)
        return mine

    return change


def put(place: Any, value: Any) -> Operation:
    return changed(lambda w: w.__setitem__(place, value))


LOCAL: dict[str, Operation] = {
    "add": lambda w: w + 2 * w,
    "add whole": lambda w: w + OTHER,
    "of whole": lambda w: OTHER - w,
    "row": lambda w: w * OTHER[0],
    "column": lambda w: OTHER[:, :1] / w,
    "number": lambda w: 2 - w,
    "where": lambda w: torch.where(w > 0, w, OTHER),
    "clamp": lambda w: w.clamp(-0.1, 0.1),
    "compare": lambda w: w <= OTHER,
    "finite": torch.isfinite,
    "float": lambda w: w.float(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "copy": lambda w: copy.copy(w.detach()),
    "zeros": torch.zeros_like,
    "new": lambda w: w.new_full(w.shape, 3.0),
    "sqrt": lambda w: w.abs().sqrt(),
    "flat": lambda w: w.view(-1) * 2,
    "reshape": lambda w: w.reshape(2, 10),
    "none": lambda w: w[None],
    "foreach": lambda w: torch._foreach_mul([w.detach(), w.data], [2.0, 3.0])[1],
    "addcdiv": lambda w: torch._foreach_addcdiv([w.detach()], [w.data], [w.data], 0.5)[0],
    "bits": lambda w: w.detach().view(torch.int64),
}
NUMBERS: dict[str, Operation] = {
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(),
    "max": lambda w: w.max(),
    "min": lambda w: w.min(),
    "amax": lambda w: w.amax(),
    "any": lambda w: (w > 1).any(),
    "all": lambda w: torch.isfinite(w).all(),
    "norm": lambda w: w.norm(),
    "norm 1": lambda w: torch.norm(w, 1),
    "norm 3": lambda w: torch.linalg.vector_norm(w, 3.5),
    "norm inf": lambda w: w.norm(float("inf")),
    "norm -inf": lambda w: w.norm(-float("inf")),
    "norm 0": lambda w: w.norm(0),
    "matrix norm": torch.linalg.norm,
    "nuclear": lambda w: torch.linalg.matrix_norm(w, "nuc"),
    "std": lambda w: w.std(),
    "dot": lambda w: torch.dot(w.view(-1), w.flatten()),
    "vdot": lambda w: torch.vdot(w.view(-1), OTHER.view(-1)),
    "norms": lambda w: torch._foreach_norm([w.detach(), w.data * 2])[1],
    "total norm": lambda w: nn.utils.get_total_norm([w.detach(), OTHER]),
    "all close": lambda w: torch.allclose(w, w.detach() + 1e-9),
    "equal": lambda w: torch.equal(w, w.clone()),
    "item": lambda w: w[2, 3].item(),
    "number of": lambda w: float(w[0, 0]),
    "list": lambda w: w.tolist(),
    "count": lambda w: torch.count_nonzero(w > 0),
    "format": lambda w: f"{w.norm():.6f}",
    "argmax": lambda w: w.argmax(),
    "product": lambda w: w.prod(),
    "median": lambda w: w.median(),
    "contains": lambda w: 5.0 in w,
    "truth": lambda w: bool((w < 9).all()),
    "numel": lambda w: w.numel(),
}
WHOLE: dict[str, Operation] = {
    "transpose": lambda w: w.T,
    "mT": lambda w: w.mT,
    "matmul": lambda w: w.t() @ w,
    "row of": lambda w: w[1],
    "slice": lambda w: w[:, 1:3],
    "mask": lambda w: w[w > 0],
    "norm by row": lambda w: w.norm(dim=1),
    "sum by column": lambda w: w.sum(0, keepdim=True),
    "cat": lambda w: torch.cat([w, OTHER]),
    "stack": lambda w: torch.stack([w.detach(), w.data]),
    "chunks": lambda w: w.chunk(2)[1],
    "rows": lambda w: [one.sum() for one in w],
    "softmax": lambda w: w.softmax(1),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "expand": lambda w: w.expand(2, 4, 5),
    "sort": lambda w: w.sort()[0],
    "outer": lambda w: w[:, :1] * w,
    "svd": lambda w: torch.linalg.svdvals(w.detach()),
    "numpy": lambda w: w.detach().numpy(),
    "array": lambda w: np.asarray(w.detach()) * 2,
    "into whole": lambda w: OTHER.clone().add_(w.detach()),
    "lerp": lambda w: OTHER.clone().lerp_(w.detach(), 0.2),
    "out": lambda w: torch.add(w.detach(), 1, out=torch.empty(4, 5, dtype=DTYPE)),
}
WRITES: dict[str, Operation] = {
    "mul_": changed(lambda w: w.mul_(2)),
    "add_": changed(lambda w: w.add_(OTHER, alpha=0.5)),
    "copy_": changed(lambda w: w.copy_(OTHER)),
    "zero_": changed(lambda w: w.zero_()),
    "clamp_": changed(lambda w: w.clamp_(-0.1, 0.1)),
    "element": put((2, 3), 7.0),
    "row_": put(1, 7.0),
    "column_": put((slice(None), 1), OTHER[:, 0]),
    "mask_": changed(lambda w: w.__setitem__(w > 0, 0.0)),
    "view_": changed(lambda w: w.view(-1).mul_(2)),
    "part of view_": changed(lambda w: w.view(-1)[3:9].mul_(2)),
    "transpose_": changed(lambda w: w.t().add_(1)),
    "diagonal_": changed(lambda w: w.fill_diagonal_(7.0)),
    "set data": changed(lambda w: setattr(w, "data", OTHER)),
    "out_": changed(lambda w: torch.add(w, 1, out=w)),
    "foreach_": changed(lambda w: torch._foreach_add_([w], [OTHER])),
    "renorm_": changed(lambda w: w.renorm_(2, 0, 0.1)),
}
REFUSED: dict[str, Operation] = {
    "pickle": lambda w: pickle.dumps(w.detach()),
    "save": lambda w: torch.save(w.data, io.BytesIO()),
    "pointer": lambda w: w.detach().data_ptr(),
    "storage": lambda w: w.detach().untyped_storage(),
    "resize": lambda w: w.detach().resize_(3),
    "another dtype": lambda w: setattr(w, "data", torch.ones(4, 5)),
    "another shape": lambda w: setattr(w, "data", OTHER[:2]),
    "transposed in place": lambda w: w.detach().t_(),
    "array written": lambda w: w.detach().numpy().fill(0),
}


def plain(value: Any) -> Any:
    """As one device has it."""
    if isinstance(value, Shard):
        return plain(value.full())
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def things(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """All that is handed out of one parameter."""
    shown = optimizer.param_groups[0]["params"][2]
    yield "the model's", model[2].weight
    yield "the groups'", shown
    yield "the model's gradient", model[2].weight.grad
    yield "the groups' gradient", shown.grad
    yield "the state", optimizer.state[shown]["exp_avg"]
    yield "the state by the model's", optimizer.state[model[2].weight]["exp_avg_sq"]


def results_on(model: Any, optimizer: Any, comm: Any) -> dict[tuple[str, str], Any]:
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, comm).backward()
        optimizer.step()
    found: dict[tuple[str, str], Any] = {}
    for what, tensor in things(model, optimizer):
        for name, operation in {**LOCAL, **NUMBERS, **WHOLE, **WRITES}.items():
            with torch.set_grad_enabled(name in ("add", "norm", "transpose", "where", "row of")):
                found[what, name] = plain(operation(tensor))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Any]:
    model = copy.deepcopy(START)
    return results_on(model, adam(model), None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", NAMES)
def test_every_operation_is_one_device_s_and_the_same_on_all_ranks(
    way: str, size: int, alone: Any
) -> None:
    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(START)
        return results_on(*rd.prepare(mine, adam(mine), strategy=way, comm=comm), comm)

    first, *others = rd.run(be_rank, size, "threads")
    assert first.keys() == alone.keys()
    for key, one in alone.items():
        if isinstance(one, (str, bool)):
            assert first[key] == one, key
        else:
            np.testing.assert_allclose(first[key], one, rtol=1e-12, atol=1e-13, err_msg=str(key))
        assert all(np.array_equal(first[key], other[key]) for other in others), key


@pytest.mark.parametrize("way", NAMES)
def test_what_needs_the_memory_of_the_whole_is_refused_by_name(way: str) -> None:
    def be_rank(comm: Any) -> None:
        mine = copy.deepcopy(START)
        mine, own = rd.prepare(mine, adam(mine), strategy=way, comm=comm)
        loss_of(mine, comm).backward()
        own.step()
        for what, tensor in things(mine, own):
            if what == "the model's" and way != "zero3":
                continue  # is whole
            for name, operation in REFUSED.items():
                with pytest.raises((InvalidArgumentError, ValueError)) as error:
                    operation(tensor)
                assert "2.weight" in str(error.value) or name == "array written", (what, name)
            assert "2.weight" in repr(tensor)
            assert f"{tensor}" == repr(tensor)
            assert tensor.shape == (4, 5)
            assert len(tensor) == 4

    rd.run(be_rank, 2, "threads")


def test_a_parameter_that_is_away_is_not_copied_or_pickled() -> None:
    def be_rank(comm: Any) -> None:
        mine = copy.deepcopy(START)
        mine, _ = rd.prepare(mine, adam(mine), strategy="zero3", comm=comm)
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            for what in (mine[2].weight, mine):
                if what is mine and use is not copy.deepcopy:
                    continue  # has the same parameters, or hooks that can not be pickled
                with pytest.raises(InvalidArgumentError, match=r"(?s)\.(weight|bias).*rd\.whole"):
                    use(what)
        with pytest.raises(InvalidArgumentError, match="dtypes before prepare"):
            mine.float()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            mine[2].weight.add_(1)
        assert mine[2].weight.untyped_storage().nbytes() == 8

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("way", NAMES)
def test_ranks_that_ask_for_different_things_are_told_so(way: str) -> None:
    def be_rank(comm: Any) -> str:
        mine = copy.deepcopy(START)
        mine, own = rd.prepare(mine, adam(mine), strategy=way, comm=comm)
        loss_of(mine, comm).backward()
        one, two = own.param_groups[0]["params"][1:3]
        with pytest.raises(CollectiveMismatch) as error:
            (one if comm.rank == 0 else two).grad.norm()
            loss_of(mine, comm).backward()
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert " is 0.bias" in told
        assert " is 2.weight" in told


@pytest.mark.parametrize("way", NAMES)
def test_what_one_rank_asks_alone_is_no_hang(way: str) -> None:
    def be_rank(comm: Any) -> None:
        mine = copy.deepcopy(START)
        mine, own = rd.prepare(mine, adam(mine), strategy=way, comm=comm)
        loss_of(mine, comm).backward()
        with pytest.raises(CollectiveMismatch):
            if comm.rank == 0:
                own.param_groups[0]["params"][0].grad.norm()
            own.step()
            loss_of(mine, comm).backward()

    rd.run(be_rank, 2, "threads")
