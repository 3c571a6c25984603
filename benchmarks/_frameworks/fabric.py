"""Lightning Fabric."""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from shared import STEPS, batch, leave, model, tell
from torch import nn

torch.set_num_threads(1)
strategy = DDPStrategy(process_group_backend=sys.argv[1])
fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2)
fabric.launch()
plain = model()
net, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
losses = []
for step in range(STEPS):
    inputs, targets = batch(step, fabric.global_rank)
    loss = nn.functional.mse_loss(net(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
if fabric.global_rank == 0:
    tell(losses)
leave(sys.argv[1])
