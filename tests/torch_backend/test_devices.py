"""One group for tensors on several devices: each call goes by the backend of its tensors."""
# mypy: disable-error-code="attr-defined,no-untyped-call,union-attr,arg-type,call-arg,override"

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from roundelay.torch import _devices
from roundelay.torch._messages import Messages
from roundelay.torch._move import Moves
from roundelay.torch._reduce import Reductions
from roundelay.torch._work import Done

HERE = "cpu:roundelay,meta:recorder"


class Recorder(dist.ProcessGroup):
    """A backend of another device, which keeps the names of the calls that it gets."""

    calls: list[str]
    supports_coalescing = True

    def __init__(self, _store: object, rank: int, size: int, _timeout: object) -> None:
        super().__init__(rank, size)
        self.calls = []

    def _get_backend(self, _: object) -> Recorder:
        return self


def _recorded(name: str) -> Any:
    def call(self: Recorder, *_: object, **__: object) -> Done:
        self.calls.append(name)
        return Done()

    return call


for _name in (
    *_devices.ROUTED, "barrier", "shutdown", "abort", "_start_coalescing", "_end_coalescing",
    "_set_default_timeout",
):  # fmt: skip
    setattr(Recorder, _name, _recorded(_name))


def group_of(backend: str) -> Any:
    if not dist.is_backend_available("recorder"):
        dist.Backend.register_backend("recorder", Recorder, devices=["meta"])
    return dist.new_group(backend=backend)


def called(group: Any, device: str) -> list[Any]:
    """Make every call of torch's on tensors of a device; return what came out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank + 1), device=device)
    found: list[Any] = []

    def out(tensors: int = 1) -> list[torch.Tensor]:
        made = [torch.zeros(2, device=device) for _ in range(tensors)]
        found.extend(made)
        return made

    dist.all_reduce(x.clone(), group=group)
    dist.reduce(x.clone(), 0, group=group)
    dist.broadcast(x.clone(), 0, group=group)
    dist.all_gather(out(size), x, group=group)
    dist.all_gather_into_tensor(torch.cat(out(size)), x, group=group)
    dist.gather(x, out(size) if rank == 0 else None, 0, group=group)
    dist.scatter(out()[0], [x] * size if rank == 0 else None, 0, group=group)
    dist.reduce_scatter(out()[0], [x] * size, group=group)
    dist.reduce_scatter_tensor(out()[0], torch.cat([x] * size), group=group)
    dist.all_to_all(out(size), [x] * size, group=group)
    dist.all_to_all_single(torch.cat(out(size)), torch.cat([x] * size), group=group)
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, out()[0], (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    with dist._coalescing_manager(group, torch.device(device)):
        for one in out(2):
            dist.all_reduce(one, group=group)
    return [one.tolist() for one in found] if device == "cpu" else []


def by_device() -> dict[str, Any]:
    group = group_of(HERE)
    usual = called(dist.group.WORLD, "cpu")
    on_cpu, none = called(group, "cpu"), list(group.others.calls)
    called(group, "meta")
    seen = list(group.others.calls)
    group.others.calls.clear()
    dist.barrier(group=group)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    group.set_timeout(dist.default_pg_timeout)
    sub = group.split_group([dist.get_rank()])
    sub.allreduce([torch.ones(1, device="meta")])
    dist.destroy_process_group(group)
    return {
        "same": usual == on_cpu, "none": none, "seen": seen, "objects": objects,
        "sub": sub.others.calls, "end": group.others.calls,
        "kept": [g for g in dist.distributed_c10d._world.pg_map if isinstance(g, Recorder)],
    }  # fmt: skip


def test_every_call_goes_by_the_backend_of_its_device(worlds: Any) -> None:
    for found in worlds.of(2)(by_device):
        assert found["same"]
        assert found["none"] == []  # nothing of the CPU's
        batch = ["_start_coalescing", "send", "recv", "_end_coalescing"]
        assert [one for one in found["seen"] if one in batch][:4] == batch
        assert len(set(found["seen"])) >= 14
        assert found["objects"] == [0, 1]
        assert found["sub"] == ["allreduce"]
        assert found["end"] == ["_set_default_timeout", "shutdown"]  # the barrier is the CPU's
        assert found["kept"] == []  # torch knows the one group that the user made


def test_no_call_on_tensors_is_left_out() -> None:
    calls = {
        name
        for part in (Reductions, Moves, Messages)
        for name, made in vars(part).items()
        if inspect.isfunction(made) and {"tensors", "output", "outputs"} & {*_named(made)}
        if not name.startswith("_") or name in {"_allgather_base", "_reduce_scatter_base"}
    }
    assert calls == {*_devices.ROUTED}


def _named(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def refused() -> list[str]:
    told = []
    for backend in ("cuda:roundelay", "cuda:roundelay,cpu:gloo", "cpu:roundelay,cuda:roundelay"):
        try:
            group_of(backend)
        except ValueError as error:
            told.append(str(error))
    return told


def test_other_devices_than_the_cpu_are_refused(worlds: Any) -> None:
    for told in worlds.of(2)(refused):
        assert len(told) == 3
        assert all("cpu:roundelay,cuda:nccl" in one for one in told)


def trained(kind: str) -> bool:
    found = []
    for backend in ("roundelay", "cpu:roundelay", "cpu:roundelay,cuda:gloo"):
        group = dist.new_group(backend=backend)
        torch.manual_seed(3)
        net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        if kind == "ddp":
            net = DistributedDataParallel(net, process_group=group)
        else:
            net = fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            made = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = net(torch.randn(6, 8, generator=made)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        backends = [group._get_backend(device).name() for device in group._device_types]
        assert backends == ["roundelay", "gloo"][: 1 + ("gloo" in backend)]
    return found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_is_the_same_with_other_devices_beside(worlds: Any, kind: str) -> None:
    assert all(worlds.of(2)(trained, kind))
