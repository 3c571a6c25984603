"""DeepSpeed's ZeRO, at the stage that is given."""

import sys

import deepspeed
import torch
from shared import STEPS, batch, leave, model, tell
from torch import nn

torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend=sys.argv[1])
plain = model()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[3])},
    "gradient_clipping": 1.0,
}
net, *_ = deepspeed.initialize(model=plain, model_parameters=plain.parameters(), config=config)
losses = []
for step in range(STEPS):
    inputs, targets = batch(step, deepspeed.comm.get_rank())
    loss = nn.functional.mse_loss(net(inputs), targets)
    net.backward(loss)
    net.step()
    losses.append(loss.item())
if deepspeed.comm.get_rank() == 0:
    tell(losses)
deepspeed.comm.destroy_process_group()
leave(sys.argv[1])
