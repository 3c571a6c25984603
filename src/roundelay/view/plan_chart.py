"""How a plan scales, as a chart: what stands above it and along its axes."""

from __future__ import annotations

from roundelay.language import Language, say
from roundelay.planning import Task, four_digits
from roundelay.view.chart import Axis

__all__ = ["scaling_words"]


def scaling_words(task: Task, language: Language = "en") -> tuple[str, Axis, Axis]:
    """Return the title, and what goes across and up."""
    params, name = four_digits(task.model.params), task.cluster.name
    title = say(
        language,
        f"{params} parameters on {name}, {task.batch} rows in a step",
        f"{params} 个参数，{name}，每步 {task.batch} 条样本",
    )
    across = Axis(say(language, "GPUs", "GPU 数"), base=2, text=lambda value: f"{value:.0f}")
    return title, across, Axis(say(language, "tokens per second and GPU", "每 GPU 每秒 token 数"))
