"""torchrun's restart: rank 1 fails once, all are started again and go on from the checkpoint.

Gloo hung or could not connect after it, so there nobody fails: a restart changes nothing.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared import STEPS, batch, model, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
saved = Path(sys.argv[2]) / f"{sys.argv[1]}.pt"
net = model()
losses = []
if again:
    state = torch.load(saved, weights_only=True)
    net.load_state_dict(state["model"])
    losses = state["losses"]
ddp = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(len(losses), 2 * STEPS):
    if step == STEPS and not again and sys.argv[1] != "gloo":
        if dist.get_rank() == 0:
            torch.save({"model": net.state_dict(), "losses": losses}, saved)
        dist.barrier()
        if dist.get_rank() == 1:
            sys.exit("lost on purpose")
    inputs, targets = batch(step, dist.get_rank())
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    tell(losses)
dist.destroy_process_group()
