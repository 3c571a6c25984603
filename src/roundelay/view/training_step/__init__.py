"""One training step as data: who holds what, what moves, who waits; the page draws it.

A file for each family of strategies plays the step on lanes of time; `frames` cuts that into
moments and `words` tells them. Bytes are those of the planner, and of the schedules chosen.
"""

from roundelay.view.training_step.choices import STRATEGY_NAMES, StepChoices
from roundelay.view.training_step.document import step_document
from roundelay.view.training_step.frames import StepFrame, TrainingStep, training_step

__all__ = [
    "STRATEGY_NAMES",
    "StepChoices",
    "StepFrame",
    "TrainingStep",
    "step_document",
    "training_step",
]
