"""What is said of a training step, in English and in Chinese: sentences with places to fill."""

from __future__ import annotations

__all__ = ["NAMES", "PHRASES"]

#: The strategies, as people call them.
NAMES = {
    "ddp": ("DDP", "DDP（数据并行）"),
    "zero1": ("ZeRO-1", "ZeRO-1（切分优化器状态）"),
    "zero2": ("ZeRO-2", "ZeRO-2（再切分梯度）"),
    "zero3": ("ZeRO-3", "ZeRO-3（再切分参数）"),
    "ps": ("Parameter server, synchronous", "参数服务器（同步）"),
    "ps-async": ("Parameter server, asynchronous", "参数服务器（异步）"),
    "ps-ssp": ("Parameter server, bounded staleness", "参数服务器（有界陈旧度）"),
}

#: By key: English, Chinese.
PHRASES = {
    # ---- titles
    "title start": ("Before the step", "一步开始之前"),
    "title end": ("The step is over", "这一步结束了"),
    "title end alone": ("The steps are over", "这几步结束了"),
    "title forward": ("Forward", "前向"),
    "title forward of": ("Forward of {units}", "{units}的前向"),
    "title backward": ("Backward", "反向"),
    "title backward of": ("Backward of {units}", "{units}的反向"),
    "title step": ("Optimizer step", "优化器更新"),
    "title step shard": ("Optimizer step, each on its shard", "优化器更新，各自更新自己的分片"),
    "title wait": ("Waiting", "等待"),
    "title all_reduce": ("all-reduce of {what}", "{what}：all-reduce"),
    "title reduce_scatter": ("reduce-scatter of {what}", "{what}：reduce-scatter"),
    "title all_gather": ("all-gather of {what}", "{what}：all-gather"),
    "title push": ("{who} pushes", "{who} 推送梯度"),
    "title pull": ("{who} pulls", "{who} 拉取"),
    "title update": ("the server updates", "服务器更新参数"),
    # ---- names of things
    "layer": ("layer {number}", "第 {number} 层"),
    "layers": ("layers {first} to {last}", "第 {first} 至 {last} 层"),
    "bucket": ("bucket {number} ({units})", "桶 {number}（{units}）"),
    "rank": ("rank {rank}", "rank {rank}"),
    "ranks": ("ranks {ranks}", "rank {ranks}"),
    # ---- before the step
    "start ddp": (
        (
            "Every rank holds the whole model and the whole optimizer state, {held} in all. The "
            "batch is divided between the ranks."
        ),
        "每个 rank（进程）都存一份完整的模型和优化器状态，共 {held}；批次均匀分给各个 rank。",
    ),
    "start zero1": (
        (
            "Parameters are whole on every rank; of the optimizer state rank r owns shard r "
            "alone, 1/{ranks} of it."
        ),
        "每个 rank 都有完整的参数；优化器状态被切成 {ranks} 份，rank r 只保存第 r 个分片。",
    ),
    "start zero2": (
        (
            "As in ZeRO-1 the optimizer state is divided; in this step gradients will be, too: "
            "each rank keeps 1/{ranks} of them."
        ),
        "和 ZeRO-1 一样，优化器状态已经切分；这一步里梯度也会切分，每个 rank 只留 1/{ranks}。",
    ),
    "start zero3": (
        (
            "Everything is divided: rank r owns shard r of parameters, gradients and optimizer "
            "state, 1/{ranks} of each."
        ),
        "所有东西都切分了：rank r 只保存参数、梯度和优化器状态的第 r 个分片，各占 1/{ranks}。",
    ),
    "start ps": (
        (
            "Every worker holds the whole model. Rank 0 is the server, too: it has an inbox for "
            "each worker."
        ),
        "每个 worker 都有完整的模型。rank 0 同时兼任服务器，为每个 worker 准备一个收件缓冲。",
    ),
    "start ps-async": (
        (
            "The server on rank 0 holds the parameters and the optimizer state; workers hold a "
            "copy of the parameters, now of version 0."
        ),
        "rank 0 上的服务器保存参数和优化器状态；各 worker 持有参数的副本，目前都是版本 0。",
    ),
    "start ps-ssp": (
        (
            "As in asynchronous training, but no worker may be more than {staleness} ahead of the"
            " slowest."
        ),
        "和异步训练一样，但任何 worker 都不能比最慢的快出 {staleness} 步以上。",
    ),
    "start mixed": (
        (
            "In bf16 a parameter and a gradient take 2 bytes each; the optimizer keeps fp32 "
            "master weights and two moments, 12 bytes."
        ),
        "bf16 混合精度下参数和梯度各占 2 字节；优化器保存 fp32 主权重和两个动量，共 12 字节。",
    ),
    "start plain": (
        "In fp32 a parameter and a gradient take 4 bytes each, Adam's two moments 8.",
        "fp32 下参数和梯度各占 4 字节，Adam 的两个动量占 8 字节。",
    ),
    "start straggler": (
        "Rank {rank} computes {times} times as slowly as the others.",
        "rank {rank} 是掉队者（straggler），计算耗时是别人的 {times} 倍。",
    ),
    # ---- computing
    "forward": (
        "Each rank runs forward on its own part of the batch, with the same weights.",
        "每个 rank 用相同的权重，对自己那份数据做前向计算。",
    ),
    "forward zero3": (
        (
            "{Units} is whole on every rank for this moment: forward computes with it, then all "
            "but the own shard is freed."
        ),
        "{units}此刻在每个 rank 上都是完整的：用它做完前向，就只留下自己的分片，其余释放。",
    ),
    "backward": (
        (
            "Backward of {units}: every rank gets a gradient from its own part of the batch, and "
            "these differ."
        ),
        "{units}的反向：每个 rank 用自己那份数据算出梯度，各不相同。",
    ),
    "backward zero3": (
        (
            "Backward of {units} computes with the gathered weights, gives a gradient, and frees "
            "the weights."
        ),
        "用收集来的权重做{units}的反向，得到梯度后立即释放这些权重。",
    ),
    "step": (
        "All ranks step on the same mean gradient, so that the weights stay the same everywhere.",
        "所有 rank 用同一个平均梯度更新参数，因此各处的权重始终一致。",
    ),
    "step shard": (
        "Each rank updates its own shard alone: 1/{ranks} of the work, and of the state.",
        "每个 rank 只更新自己的分片：计算量和状态都只有 1/{ranks}。",
    ),
    "step mixed": (
        "Adam steps on fp32 master weights, and rounds the result to bf16.",
        "Adam 在 fp32 主权重上更新，再把结果舍入为 bf16。",
    ),
    "some forward": ("{Who}: forward of {units}.", "{who}：{units}的前向。"),
    "some backward": ("{Who}: backward of {units}.", "{who}：{units}的反向。"),
    "some step": ("{Who}: optimizer step.", "{who}：优化器更新。"),
    # ---- moving
    "all_reduce": (
        (
            "{What} is full on all ranks and is all-reduced: each sends {sent}, and all get the "
            "same mean."
        ),
        (
            "{what}在所有 rank 上都已填满，开始 all-reduce（全规约）：每个 rank 发送 {sent}，大家"
            "得到同一个平均梯度。"
        ),
    ),
    "reduce_scatter keep": (
        (
            "{What} is reduce-scattered: each sends {sent}, and rank r gets the mean of shard r. "
            "The memory of the rest stays."
        ),
        (
            "{what}做 reduce-scatter（规约散播）：每个 rank 发送 {sent}，rank r 得到第 r 个分片的"
            "平均梯度；其余部分的内存仍保留。"
        ),
    ),
    "reduce_scatter free": (
        (
            "{What} is reduce-scattered: each sends {sent}, rank r gets the mean of shard r, and "
            "the rest is freed."
        ),
        (
            "{what}做 reduce-scatter（规约散播）：每个 rank 发送 {sent}，rank r 得到第 r 个分片的"
            "平均梯度，其余立即释放。"
        ),
    ),
    "all_gather after": (
        (
            "Each rank has new weights of its shard alone, so {what} is all-gathered: each sends "
            "{sent}."
        ),
        (
            "每个 rank 只有自己分片的新权重，于是{what}做 all-gather（全收集）：每个 rank 发送 "
            "{sent}。"
        ),
    ),
    "all_gather before": (
        "{What} is all-gathered, because it computes next: each sends {sent}.",
        "接下来要用{what}计算，所以先做 all-gather（全收集）：每个 rank 发送 {sent}。",
    ),
    "all_gather ahead": (
        "Meanwhile {what} is all-gathered ahead of its use: each sends {sent}.",
        "与此同时预取{what}：all-gather（全收集），每个 rank 发送 {sent}。",
    ),
    "push": (
        "{Who} pushes its gradient to the server, {sent}.",
        "{who} 把梯度推送给服务器，共 {sent}。",
    ),
    "push stale": (
        (
            "{Who} pushes a gradient of version {version}, {sent}; the server is at version {now}"
            ": the gradient has missed {count}."
        ),
        (
            "{who} 推送基于版本 {version} 的梯度，共 {sent}；服务器已是版本 {now}，这个梯度错过了"
            " {count} 次更新。"
        ),
    ),
    "pull gradients": (
        "The server has added up the gradients of all workers and sends {who} the mean, {sent}.",
        "服务器已把所有 worker 的梯度累加求平均，现在发给 {who}，共 {sent}。",
    ),
    "pull parameters": (
        "The server answers {who} with the parameters of version {version}, {sent}.",
        "服务器把版本 {version} 的参数发给 {who}，共 {sent}。",
    ),
    "update": (
        (
            "The server applies the gradient as soon as it has come, without waiting for anyone: "
            "version {version}."
        ),
        "梯度一到，服务器就更新参数，不等其他人：得到版本 {version}。",
    ),
    # ---- waiting
    "wait rank": ("{Who} waits for {whom}.", "{who} 在等 {whom}。"),
    "wait ranks": ("{Who} wait for {whom}.", "{who} 在等 {whom}。"),
    "wait network": (
        "Meanwhile nothing can be computed: the ranks wait.",
        "在此期间没有可算的，大家只能等通信完成。",
    ),
    "wait server": ("{Who} waits for the server.", "{who} 在等服务器。"),
    "wait servers": ("{Who} wait for the server.", "{who} 在等服务器。"),
    "wait bound": (
        (
            "{Who}: {count} steps ahead of {whom}, the slowest; the answer waits until that has "
            "caught up."
        ),
        "{who} 比最慢的 {whom} 快了 {count} 步，要等它跟上才能得到答复。",
    ),
    # ---- after the step
    "end ddp": (
        "Each rank sent {sent}: 2Ψ(N-1)/N elements. All hold the same new weights.",
        "每个 rank 共发送 {sent}，即 2Ψ(N-1)/N 个元素；所有 rank 的新权重相同。",
    ),
    "end zero1": (
        "Each rank sent {sent}: as much as DDP. It holds {held} instead of {whole}.",
        "每个 rank 共发送 {sent}，与 DDP 相同；占用 {held}，而 DDP 是 {whole}。",
    ),
    "end zero3": (
        (
            "Each rank sent {sent}: 3Ψ(N-1)/N elements, 1.5 times as much as DDP. It holds {held}"
            " instead of {whole}."
        ),
        (
            "每个 rank 共发送 {sent}，即 3Ψ(N-1)/N 个元素，是 DDP 的 1.5 倍；占用 {held}，而 DDP "
            "是 {whole}。"
        ),
    ),
    "end ps": (
        (
            "Each worker sent {sent}; the server sent {server}, as much as all of them got: it is"
            " the bottleneck."
        ),
        "每个 worker 发送 {sent}；服务器发送 {server}，等于所有 worker 收到的总和：它是瓶颈。",
    ),
    "end ps-async": (
        "{updates} updates; nobody waited for the slowest. A gradient missed {most} at most.",
        "共 {updates} 次更新，没有人等最慢的；梯度最多错过 {most} 次更新。",
    ),
    "end ps-ssp": (
        "{updates} updates. A gradient missed {most}; more than {bound} it never can.",
        "共 {updates} 次更新；梯度最多错过 {most} 次，上界是 {bound}。",
    ),
    "end alone": ("There is one rank: nothing was sent.", "只有一个 rank，不需要通信。"),
    "updates": ("{count} updates", "{count} 次更新"),
    "one update": ("1 update", "1 次更新"),
}
