"""torch's tensor parallel, on DTensor."""

import sys

import torch
import torch.distributed as dist
from shared import STEPS, batch, model, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
losses = []
for step in range(STEPS):
    inputs, targets = batch(step, 0)
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    tell(losses)
dist.destroy_process_group()
