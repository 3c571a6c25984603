"""torch's FSDP2, with clipped gradients."""

import sys

import torch
import torch.distributed as dist
from shared import STEPS, batch, model, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
net = model()
for layer in net.children():
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
losses = []
for step in range(STEPS):
    inputs, targets = batch(step, dist.get_rank())
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.item(), norm.full_tensor().item()]
if dist.get_rank() == 0:
    tell(losses)
dist.destroy_process_group()
