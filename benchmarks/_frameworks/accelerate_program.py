"""Accelerate: the group is made first, since on a CPU it knows gloo and mpi only."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from shared import STEPS, batch, model, tell
from torch import nn

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)
plain = model()
net, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
losses = []
for step in range(STEPS):
    inputs, targets = batch(step, accelerator.process_index)
    loss = nn.functional.mse_loss(net(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses += accelerator.gather(loss.detach().reshape(1)).tolist()
if accelerator.is_main_process:
    tell(losses)
accelerator.end_training()
