"""torchtitan's Trainer on its Llama 3, by FSDP, tensor parallel or pipeline parallel.

It knows GPUs only, so that it is told here what a CPU is, as it asks torch.cuda.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from shared import STEPS, tell
from torch.distributed.fsdp import FSDPModule

CPU = SimpleNamespace(
    set_device=torch.cpu.set_device,
    current_device=lambda: 0,
    get_device_name=str,
    get_device_properties=lambda _: SimpleNamespace(total_memory=1),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=torch.cpu.synchronize,
)
with patch.multiple(
    "torch._utils", _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: CPU
):
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

TOKENS, WORDS = 16, 64
losses = []


class Rows(torch.utils.data.IterableDataset):
    """Sequences of a rank, without end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels."""
        made = torch.Generator().manual_seed(self.rank)
        while True:
            row = torch.randint(0, WORDS, (TOKENS + 1,), generator=made)
            yield {"input": row[:-1]}, row[1:]


class Told(MetricsProcessor):
    """Keeps losses and norms of gradients."""

    def log(self, step: int, *values: float, **_: object) -> None:
        """Keep those of a step."""
        losses.extend((step, *values))


def loader(
    dp_world_size: int, dp_rank: int, job_config: JobConfig, **_: object
) -> ParallelAwareDataloader:
    """Return batches of a rank of the data-parallel axis."""
    size = job_config.training.local_batch_size
    return ParallelAwareDataloader(
        Rows(dp_rank), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=size
    )


small = TransformerModelArgs(dim=32, n_layers=4, n_heads=4, vocab_size=WORDS)
register_train_spec(
    "small",
    dataclasses.replace(
        get_train_spec(),
        model_args={"small": small},
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Told,
        state_dict_adapter=None,
    ),
)
config = JobConfig()
config.job.dump_folder = sys.argv[2]
config.model.name = config.model.flavor = "small"
config.debug.seed = 7
config.metrics.log_freq = 1
config.training.seq_len = TOKENS
config.training.steps = STEPS
config.training.local_batch_size = 4
config.lr_scheduler.warmup_steps = 1
setattr(config.parallelism, f"{sys.argv[3]}_degree", int(os.environ["WORLD_SIZE"]))

torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
trainer = Trainer(config)
for module in trainer.model_parts[0].modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
trainer.train()
if dist.get_rank() == dist.get_world_size() - 1:  # the last stage has the loss
    tell(losses)
dist.destroy_process_group()
