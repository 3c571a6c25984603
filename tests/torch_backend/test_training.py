"""What torch builds on process groups gives on ours what it gives on gloo, step for step."""
# ruff: noqa: FBT001, PLC0415 - ranks are sent arguments by position; some imports warn
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint  # noqa: PLR0402 - says what it exports
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
_gloo: list[dist.ProcessGroup] = []


def both() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return our group of all ranks, and gloo's in the same processes."""
    ours = dist.group.WORLD
    assert ours is not None
    if not _gloo:
        _gloo.append(dist.new_group(backend="gloo"))
    return ours, _gloo[0]


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 8, generator=made), torch.randn(6, 4, generator=made)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(net: nn.Module) -> list[torch.Tensor]:
    found = [*net.state_dict().values()]
    return [
        one.full_tensor() if isinstance(one, DTensor) else one.detach().clone() for one in found
    ]


def assert_same(
    made: Callable[[dist.ProcessGroup], tuple[list[float], list[torch.Tensor]]],
    **close: Any,  # options of assert_close
) -> bool:
    ours, gloo = both()
    losses, tensors = made(ours)
    again, _ = made(ours)
    expected, others = made(gloo)
    assert losses == again  # to the last bit
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **close)
    for one, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(one, other, **close)
    return len(tensors) > 0


def ddp(options: dict[str, Any], hook: str | None) -> bool:
    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        net = DistributedDataParallel(model(), process_group=group, **options)
        if hook == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            net.register_comm_hook(group, fp16_compress_hook)
        if hook == "powerSGD":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
                PowerSGDState,
                powerSGD_hook,
            )

            state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            net.register_comm_hook(state, powerSGD_hook)
        losses = train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        return losses, values(net.module)

    # Gloo rounds half precision at every hop, we once.
    return assert_same(made, **({"rtol": 1e-2, "atol": 1e-3} if hook == "fp16" else {}))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("options", "hook"),
    [
        ({}, None),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, None),
        ({"find_unused_parameters": True, "broadcast_buffers": False}, None),
        ({"static_graph": True}, None),
        ({}, "fp16"),
        ({"bucket_cap_mb": 0.001}, "powerSGD"),
    ],
)
def test_ddp(worlds: Any, size: int, options: dict[str, Any], hook: str | None) -> None:
    assert all(worlds.of(size)(ddp, options, hook))


def ddp_sparse() -> bool:
    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        both_kinds = DistributedDataParallel(net, process_group=group)
        optimizer = torch.optim.SGD(both_kinds.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            loss = both_kinds(torch.tensor([step, dist.get_rank(), 9])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, values(net)

    return assert_same(made)


def test_ddp_with_sparse_gradients(worlds: Any) -> None:
    assert all(worlds.of(2)(ddp_sparse))


def uneven_inputs() -> bool:
    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(5)
        net = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        with net.join():
            for step in range(2 + 2 * dist.get_rank()):
                inputs, targets = batch(step)
                loss = nn.functional.mse_loss(net(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, values(net.module)

    return assert_same(made)


def test_ddp_joins_ranks_with_fewer_inputs(worlds: Any) -> None:
    assert all(worlds.of(2)(uneven_inputs))


def fsdp(precision: bool, ours: bool) -> bool:
    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision else None
        options: dict[str, Any] = {"mp_policy": policy} if policy else {}
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        whole = fully_shard(net, mesh=mesh, **options)
        if ours and group.name() == "roundelay":  # gloo has no memory of its own to give
            for module in whole.modules():
                if isinstance(module, FSDPModule):
                    module.set_allocate_memory_from_process_group_for_comm(enable=True)
        losses = []
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(STEPS):
            inputs, targets = batch(step)
            loss = nn.functional.mse_loss(net(inputs).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, values(net)

    return assert_same(made)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("precision", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_fsdp2(worlds: Any, size: int, precision: bool, ours: bool) -> None:
    """Also with buffers from our arena, where nothing is staged."""
    assert all(worlds.of(size)(fsdp, precision, ours))


def hsdp() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    alone = copy.deepcopy(net)
    fully_shard(net, mesh=mesh)
    inputs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    net(inputs[dist.get_rank()]).square().mean().backward()
    sum(alone(one).square().mean() for one in inputs).div(4).backward()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    return True


def test_fsdp2_in_replicated_groups_gives_what_one_process_does(worlds: Any) -> None:
    assert all(worlds.of(4)(hsdp))


def zero() -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(7)
        # No normalization: Adam blows up the rounding errors of gradients that should be zero.
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        wrapped = DistributedDataParallel(net, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        losses = train(wrapped, optimizer)
        optimizer.consolidate_state_dict(0)
        return losses, values(net)

    return assert_same(made)


@pytest.mark.parametrize("size", [2, 3])
def test_zero_redundancy_optimizer(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(zero))


def tensor_parallel() -> bool:
    def made(group: dist.ProcessGroup) -> tuple[list[float], list[torch.Tensor]]:
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        losses = []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        for _ in range(STEPS):
            loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, values(net)

    return assert_same(made)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(tensor_parallel))


def redistributions() -> int:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(6.0 * 10).view(6, 10)
    done = 0
    for before in (Shard(0), Shard(1), Replicate()):
        made = distribute_tensor(whole, mesh, [before])
        for after in (Shard(0), Shard(1), Replicate()):
            torch.testing.assert_close(made.redistribute(mesh, [after]).full_tensor(), whole)
            done += 1
    return done


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dtensor_redistributes(worlds: Any, size: int) -> None:
    assert worlds.of(size)(redistributions) == [9] * size


def saved_and_loaded(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 30), nn.Linear(30, 4))
    fully_shard(net, mesh=mesh)
    before = values(net)
    checkpoint.save(net.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = net.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    net.load_state_dict(state)
    for one, other in zip(values(net), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    later: Any = checkpoint.async_save(net.state_dict(), checkpoint_id=folder)
    later.result()
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_checkpoint(worlds: Any, size: int, tmp_path: Path) -> None:
    assert all(worlds.of(size)(saved_and_loaded, str(tmp_path)))


def attention_over_ranks(rotate: str) -> bool:
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        _templated_ring_attention,
        set_rotate_method,
    )

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = q, k, v = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    set_rotate_method(rotate)
    # The parts that torch's context_parallel is made of; its own kernels are for CUDA only.
    for group in both():
        mesh = DeviceMesh.from_group(group, "cpu")
        shards = [one.clone() for one in whole]
        with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]):
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, _ = _templated_ring_attention(
                group, 2, kernel, shards[0], shards[1], shards[2], is_causal=True
            )
            (joined,) = _attention.context_parallel_unshard(mesh, [out], [2])
        torch.testing.assert_close(joined, expected)
        assert out.shape[2] == 16 // size, rank
        assert all(torch.equal(one, other) for one, other in zip(shards, whole, strict=True))
    return True


@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel(worlds: Any, size: int, rotate: str) -> None:
    assert all(worlds.of(size)(attention_over_ranks, rotate))


def functional_collectives(group: Any) -> list[torch.Tensor]:
    x = torch.arange(4.0) + dist.get_rank()
    size = dist.get_world_size()
    return [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x.repeat(size), "sum", 0, group),
        functional.all_to_all_single(x.repeat(size), None, None, group),
        functional.broadcast(x, 0, group),
        *functional.all_reduce_coalesced([x, 2 * x], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, 2 * x], group),
        *functional.reduce_scatter_tensor_coalesced([x.repeat(size)] * 2, "sum", [0, 0], group),
    ]


def compiled() -> int:
    ours, gloo = both()
    expected = [one + 0 for one in functional_collectives(gloo)]
    eager = [one + 0 for one in functional_collectives(ours)]
    graph = torch.compile(functional_collectives, backend="aot_eager", fullgraph=True)(ours)
    for one, two, three in zip(eager, graph, expected, strict=True):
        torch.testing.assert_close(one, three, rtol=0, atol=0)
        torch.testing.assert_close(two, three, rtol=0, atol=0)
    return len(expected)


@pytest.mark.parametrize("size", [2, 4])
def test_compiled_functional_collectives(worlds: Any, size: int) -> None:
    assert worlds.of(size)(compiled) == [11] * size
