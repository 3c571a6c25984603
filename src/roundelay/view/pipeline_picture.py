"""What terminal, SVG and page draw of a pipeline schedule: a row per rank, a box per action."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.language import Language, say
from roundelay.pipelines import (
    PipelineAction,
    PipelinePrice,
    PipelineSchedule,
    StageCosts,
    price_pipeline,
    prove_pipeline,
)
from roundelay.view.terminal_text import number_of, three_digits

__all__ = ["LETTERS", "MEANINGS", "PipelineBox", "PipelinePicture", "pipeline_picture"]

LETTERS = {"forward": "F", "backward": "B", "input_grad": "B", "weight_grad": "W"}
#: What the letters mean: where backward is whole, and where it is split.
MEANINGS = {
    False: {"F": "forward", "B": "backward"},
    True: {"F": "forward", "B": "gradient of the input", "W": "gradients of the weights"},
}
CHINESE_MEANINGS = {
    False: {"F": "前向", "B": "反向"},
    True: {"F": "前向", "B": "对输入的梯度", "W": "对权重的梯度"},
}


@dataclass(frozen=True, slots=True)
class PipelineBox:
    """One action in time; `local` numbers the stages of its rank."""

    letter: str
    micro_batch: int
    stage: int
    local: int
    start: float
    end: float
    words: str  # what it is, in full


@dataclass(frozen=True, slots=True)
class PipelinePicture:
    """A pipeline's timeline, and what is said beside it."""

    schedule: PipelineSchedule
    price: PipelinePrice
    peaks: tuple[int, ...]
    title: str
    names: tuple[str, ...]  # of ranks
    rows: tuple[tuple[PipelineBox, ...], ...]
    notes: tuple[str, ...]
    language: Language = "en"

    @property
    def split(self) -> bool:
        """Whether backward passes are in two halves."""
        return bool(self.schedule.split)

    def stages_text(self, rank: int) -> str:
        """Name the stages of a rank."""
        stages = self.schedule.stages_of(rank)
        numbers = ", ".join(map(str, stages))
        english = f"stage{'s' if len(stages) > 1 else ''} {numbers}"
        return say(self.language, english, f"阶段 {numbers}")

    def meanings(self) -> dict[str, str]:
        """Return what the letters of boxes mean."""
        return (CHINESE_MEANINGS if self.language == "zh" else MEANINGS)[self.split]


def _words(action: PipelineAction, start: float, end: float, language: Language) -> str:
    """Say what a box is, and when."""
    meaning = CHINESE_MEANINGS[action.kind != "backward"][LETTERS[action.kind]]
    times = three_digits(start), three_digits(end)
    return say(
        language,
        "{}, from {} to {}".format(action, *times),
        "微批 {} 在阶段 {} 的{}，从 {} 到 {}".format(
            action.micro_batch, action.stage, meaning, *times
        ),
    )


def pipeline_picture(
    schedule: PipelineSchedule,
    costs: StageCosts | None = None,
    *,
    transfer: float = 0.0,
    formula: str = "",
    rank_name: str = "GPU",
    language: Language = "en",
) -> PipelinePicture:
    """Return the picture of a schedule that is proved; `formula` is what its bubble should be."""
    proof = prove_pipeline(schedule)
    price = price_pipeline(schedule, costs, transfer=transfer)
    rows = []
    for rank, spans in enumerate(price.spans):
        local = {stage: at for at, stage in enumerate(schedule.stages_of(rank))}
        rows.append(
            tuple(
                PipelineBox(
                    LETTERS[action.kind],
                    action.micro_batch,
                    action.stage,
                    local[action.stage],
                    start,
                    end,
                    _words(action, start, end, language),
                )
                for action, start, end in spans
            )
        )
    said = f" = {formula}" if formula else ""
    most, works = max(proof.peaks), three_digits(max(price.busy))
    time, sent = three_digits(price.makespan), proof.messages
    notes = (
        say(language, f"{price.bubble:.1%} of the time is bubble{said}",
            f"{price.bubble:.1%} 的时间是气泡{said}"),
        say(language, f"{time} units of time, of which a rank works {works}",
            f"共 {time} 个时间单位，一个 rank 工作 {works}"),
        say(language, f"at most {number_of(most, 'activation')} at a time on a rank",
            f"一个 rank 上最多同时保留 {most} 份激活"),
        say(language, f"{number_of(sent, 'message')} between ranks", f"rank 之间共 {sent} 条消息"),
    )  # fmt: skip
    stages, ranks, count = schedule.stages, schedule.size, schedule.micro_batches
    title = say(
        language,
        f"{schedule.name}: {number_of(stages, 'stage')} on {number_of(ranks, 'rank')}, "
        f"{number_of(count, 'micro-batch')}".replace("batchs", "batches"),
        f"{schedule.name}：{ranks} 个 rank 上的 {stages} 个阶段，{count} 个微批",
    )
    names = tuple(f"{rank_name} {rank}" for rank in range(schedule.size))
    return PipelinePicture(schedule, price, proof.peaks, title, names, tuple(rows), notes, language)
