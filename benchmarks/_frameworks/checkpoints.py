"""torch's distributed checkpoints: saved in the background, loaded, and trained on."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import STEPS, batch, model, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
losses = []
for part in range(2):
    net = fully_shard(model(), mesh=mesh)
    if part:
        state = net.state_dict()
        dcp.load(state, checkpoint_id=folder[0])
        net.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not part:
        later = dcp.async_save(net.state_dict(), checkpoint_id=folder[0])
        later.result()
if dist.get_rank() == 0:
    tell(losses)
dist.destroy_process_group()
