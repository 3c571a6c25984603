"""Train with torch's own DistributedDataParallel; one word says who carries the gradients.

    roundelay run -n 2 12_one_word.py

`torchrun --nproc-per-node 2 12_one_word.py` starts it as well. Say "gloo" instead, and it runs on
torch's own backend, with the same losses.

Prints:

    [0] cpu:roundelay on 2 ranks: loss 1.34 -> 0.09 in 30 steps
    [0] every rank has the same weights: True
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("roundelay")  # was: "gloo"
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

generator = torch.Generator().manual_seed(rank)  # everybody has data of its own
inputs = torch.randn(256, 8, generator=generator)
targets = inputs[:, :1] - inputs[:, 1:2].sin()

losses = []
for _ in range(30):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    losses.append(mean.item())

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
gathered = [torch.empty_like(weights) for _ in range(size)]
dist.all_gather(gathered, weights)
same = all(torch.equal(weights, other) for other in gathered)
if rank == 0:
    told = f"{dist.get_backend_config()} on {size} ranks"
    print(f"{told}: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps")
    print(f"every rank has the same weights: {same}")
dist.destroy_process_group()
