"""picotron's Llama, cut along one of its axes: dp, tp, pp or cp.

Its train.py downloads a model and a text; the steps here are the same. On a CPU it needs no kernels
of flash_attn, which it imports, and has nothing to synchronize.
"""

import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from shared import STEPS, tell
from torch.nn.functional import cross_entropy

KERNELS = "flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"
OF_THEM = "flash_attn_interface", "layers.rotary", "ops.triton.layer_norm"
sys.modules |= {name: MagicMock() for name in (*KERNELS, *(f"flash_attn.{one}" for one in OF_THEM))}
torch.cuda.synchronize = lambda: None
os.environ |= {"DEVICE": "cpu", "DTYPE": "float32", "FLASH_ATTEN": "0"}

import picotron.process_group_manager as pgm  # noqa: E402 - after what it takes from os.environ
from picotron.context_parallel.context_parallel import apply_context_parallel  # noqa: E402
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: E402
from picotron.model import Llama  # noqa: E402
from picotron.pipeline_parallel import pipeline_parallel  # noqa: E402
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # noqa: E402
from picotron.utils import average_loss_across_dp_cp_ranks  # noqa: E402

AXES = "tp", "cp", "pp", "dp"
TOKENS, ROWS, MICRO, WORDS, WIDTH = 16, 2, 4, 64, 32
CPU = torch.device("cpu")


class Batches:
    """Micro-batches of a rank, as picotron's loader gives them."""

    grad_acc_steps = MICRO

    def __init__(self) -> None:
        self.made = torch.Generator().manual_seed(pgm.process_group_manager.dp_rank)

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next one."""
        here = pgm.process_group_manager
        each = TOKENS // here.cp_world_size
        rows = torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=self.made)
        mine = slice(here.cp_rank * each, (here.cp_rank + 1) * each)
        return {
            "input_ids": rows[:, :-1][:, mine].contiguous(),
            "target_ids": rows[:, 1:][:, mine].contiguous(),
            "position_ids": torch.arange(TOKENS)[mine].expand(ROWS, -1),
        }


def step_of(net: torch.nn.Module, batches: Batches) -> float:
    """Do a step without a pipeline, and return its loss."""
    total = 0.0
    for micro in range(MICRO):
        net.require_backward_grad_sync = micro == MICRO - 1
        batch = next(batches)
        said = net(input_ids=batch["input_ids"]).flatten(0, 1)
        loss = cross_entropy(said, batch["target_ids"].flatten()) / MICRO
        loss.backward()
        total += loss.item()
    return total


torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
size, rank = dist.get_world_size(), dist.get_rank()
pgm.setup_process_group_manager(
    **{f"{axis}_size": size if axis == sys.argv[3] else 1 for axis in AXES}
)
here = pgm.process_group_manager
torch.manual_seed(7)
config = SimpleNamespace(
    vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
net = Llama(config)
if here.tp_world_size > 1:
    net = apply_tensor_parallel(net)
    net.reset_parameters()
if here.pp_world_size > 1:
    net = pipeline_parallel.PipelineParallel(net, config)
net = apply_context_parallel(net)
if here.cp_dp_world_size > 1:
    net = DataParallelBucket(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
batches, losses = Batches(), []
for _ in range(STEPS):
    optimizer.zero_grad()
    if here.pp_world_size > 1:
        train = pipeline_parallel.train_step_pipeline_1f1b
        loss = train(net, batches, (ROWS, TOKENS, WIDTH), CPU, torch.float32)
    else:
        loss = step_of(net, batches)
    losses.append(average_loss_across_dp_cp_ranks(loss, CPU))
    optimizer.step()
    if isinstance(net, DataParallelBucket):
        net.reset()
if rank == size - 1:  # the last stage has the loss
    tell(losses)
dist.destroy_process_group()
