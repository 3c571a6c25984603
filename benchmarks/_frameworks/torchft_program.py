"""torchft: of two replicas one dies in the middle of a step, and the other goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from shared import STEPS, batch, model, tell
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

REPLICAS, DIES = 2, 1  # so that sums have one order

if not sys.argv[3:]:  # start the replicas
    lighthouse = LighthouseServer(
        bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1000
    )
    place = lighthouse.address().split(":")[-1].strip("/")
    replicas = [
        subprocess.Popen([sys.executable, *sys.argv, str(rank), f"http://localhost:{place}"])  # noqa: S603 - this file
        for rank in range(REPLICAS)
    ]
    ends = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    sys.exit(0 if ends == [0, 1] else f"the replicas ended with {ends}")

torch.set_num_threads(1)
if sys.argv[1] == "roundelay":
    from roundelay.torch.torchft import process_group

    group = process_group()
else:
    group = ProcessGroupGloo()
rank = int(sys.argv[3])
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
net = model()
plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
manager = Manager(
    pg=group,
    min_replica_size=1,
    load_state_dict=lambda state: (
        net.load_state_dict(state["net"]),
        plain.load_state_dict(state["plain"]),
    ),
    state_dict=lambda: {"net": net.state_dict(), "plain": plain.state_dict()},
    replica_id=f"replica{rank}",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=sys.argv[4],
    use_async_quorum=False,
)
(Path(sys.argv[2]) / str(rank)).touch()
while len([*Path(sys.argv[2]).iterdir()]) < REPLICAS:
    time.sleep(0.05)
ddp = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, plain)
losses, sizes = [], []
while manager.current_step() < 2 * STEPS:
    step = manager.current_step()
    inputs, targets = batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    if rank == DIES and step == STEPS:
        os._exit(1)  # the other does this step again
    loss.backward()
    optimizer.step()
    if manager.current_step() > step:  # else a replica was lost, and the step is done again
        losses.append(loss.item())
        sizes.append(manager.num_participants())
if rank == 0:
    if not (sizes[0] == REPLICAS and sizes[-1] == REPLICAS - 1):
        raise SystemExit(f"the numbers of replicas were {sizes}")
    tell(losses)
manager.shutdown(wait=False)
sys.stdout.flush()
os._exit(0)
