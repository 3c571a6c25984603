"""On a GPU: CPU tensors go by us and CUDA tensors by NCCL, in one group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not torch.distributed.is_nccl_available(), reason="needs a GPU"
)

SCRIPT = """\
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

backend, bound, folder = sys.argv[1], sys.argv[2] == "bound", sys.argv[3]
torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True)
options = {"device_id": torch.device("cuda:0")} if bound else {}
dist.init_process_group(backend, **options)
rank, size = dist.get_rank(), dist.get_world_size()
found = {}

def calls(device):
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x)
    y = torch.full((3,), rank + 1.0, device=device)
    dist.broadcast(y, 0)
    if "nccl" in backend or device == "cpu":
        whole = torch.empty(3 * size, device=device)
        dist.all_gather_into_tensor(whole, y)
        share = torch.empty(3, device=device)
        dist.reduce_scatter_tensor(share, whole)
        x = torch.cat([x, whole, share])
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return torch.cat([x, y]).tolist()

found["cpu"], found["cuda"] = calls("cpu"), calls("cuda")
objects = [None] * size
dist.all_gather_object(objects, rank)
found["objects"] = objects
dist.barrier()
world = dist.group.WORLD
found["backends"] = [world._get_backend(torch.device(one)).name() for one in ("cpu", "cuda")]
sub = dist.new_group(list(range(size)))
one = torch.ones(1, device="cuda")
dist.all_reduce(one, group=sub)
found["sub"] = one.item()

def trained(kind):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if kind == "ddp":
        net = DistributedDataParallel(net.cuda(), device_ids=[0])
    else:
        mesh = init_device_mesh("cuda", (size,))
        policy = {"offload_policy": CPUOffloadPolicy()} if kind == "offload" else {}
        net = net if kind == "offload" else net.cuda()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **policy)
        fully_shard(net, mesh=mesh, **policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        made = torch.Generator().manual_seed(10 * step + rank)
        loss = net(torch.randn(8, 16, generator=made).cuda()).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item().hex(), norm.item().hex()]
    if kind == "offload":
        checkpoint.save(net.state_dict(), checkpoint_id=folder)
    return losses

for kind in ("ddp", "fsdp2", "offload") if "nccl" in backend else ("ddp",):
    found[kind] = trained(kind)
if rank == 0:
    print("found", json.dumps(found), flush=True)
dist.destroy_process_group()
"""


def found(tmp_path: Path, backend: str, ranks: int, bound: str) -> dict[str, Any]:
    script, folder = tmp_path / "train.py", tmp_path / backend
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), str(script), backend, bound, str(folder),
        ],
        capture_output=True, text=True, check=False, timeout=250,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("found ")]
    made: dict[str, Any] = json.loads(line.removeprefix("found "))
    return made


@pytest.mark.parametrize("bound", ["bound", "free"])
@pytest.mark.parametrize("order", ["cpu:{cpu},cuda:nccl", "cuda:nccl,cpu:{cpu}"])
def test_one_rank_with_nccl(tmp_path: Path, order: str, bound: str) -> None:
    """NCCL takes one rank for each GPU, so there is one: DDP, FSDP2, and FSDP2 with offload."""
    ours = found(tmp_path, order.format(cpu="roundelay"), 1, bound)
    gloo = found(tmp_path, order.format(cpu="gloo"), 1, bound)
    assert ours.pop("backends") == ["roundelay", "nccl"]
    assert gloo.pop("backends") == ["gloo", "nccl"]
    assert ours == gloo  # losses and norms to the last bit


def test_two_ranks_whose_cuda_tensors_go_by_gloo(tmp_path: Path) -> None:
    ours = found(tmp_path, "cpu:roundelay,cuda:gloo", 2, "free")
    gloo = found(tmp_path, "cpu:gloo,cuda:gloo", 2, "free")
    assert ours.pop("backends") == ["roundelay", "gloo"]
    gloo.pop("backends")
    assert ours == gloo
