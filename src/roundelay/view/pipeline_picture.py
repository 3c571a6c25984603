"""What terminal, SVG and page draw of a pipeline schedule: a row per rank, a box per action."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.pipelines import (
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

    @property
    def split(self) -> bool:
        """Whether backward passes are in two halves."""
        return bool(self.schedule.split)

    def stages_text(self, rank: int) -> str:
        """Name the stages of a rank."""
        stages = self.schedule.stages_of(rank)
        return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def pipeline_picture(
    schedule: PipelineSchedule,
    costs: StageCosts | None = None,
    *,
    transfer: float = 0.0,
    formula: str = "",
    rank_name: str = "GPU",
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
                    f"{action}, from {three_digits(start)} to {three_digits(end)}",
                )
                for action, start, end in spans
            )
        )
    said = f" = {formula}" if formula else ""
    most, works = max(proof.peaks), three_digits(max(price.busy))
    notes = (
        f"{price.bubble:.1%} of the time is bubble{said}",
        f"{three_digits(price.makespan)} units of time, of which a rank works {works}",
        f"at most {number_of(most, 'activation')} at a time on a rank",
        f"{number_of(proof.messages, 'message')} between ranks",
    )
    title = (
        f"{schedule.name}: {number_of(schedule.stages, 'stage')} on "
        f"{number_of(schedule.size, 'rank')}, {number_of(schedule.micro_batches, 'micro-batch')}"
    ).replace("batchs", "batches")
    names = tuple(f"{rank_name} {rank}" for rank in range(schedule.size))
    return PipelinePicture(schedule, price, proof.peaks, title, names, tuple(rows), notes)
