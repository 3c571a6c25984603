"""Layer 4: what training takes before it runs: bytes of a rank, seconds of a step, what fits.

`plan` looks at every way to train a model on some ranks; the rest says what one way takes, and why.
Nothing here needs more than the standard library.
"""

from roundelay.planning.candidate import (
    OPTIMIZERS,
    PRECISIONS,
    SERVERS,
    STRATEGIES,
    Candidate,
    MeshShape,
    Task,
)
from roundelay.planning.document import as_document
from roundelay.planning.held import Held
from roundelay.planning.memory import RankBytes, fullest_rank
from roundelay.planning.model import ModelShape, check_heads, transformer
from roundelay.planning.reason import (
    advice,
    described,
    four_digits,
    gigabytes,
    large,
    reason,
)
from roundelay.planning.request import AXES, MOST_GPUS, USUAL_SEQUENCE, asked_choices, asked_task
from roundelay.planning.scaling import scaling
from roundelay.planning.search import PlanChoices, Planned, TrainingPlan, plan
from roundelay.planning.step_time import StepTime, step_time
from roundelay.planning.why import Term, why

__all__ = [
    "AXES",
    "MOST_GPUS",
    "OPTIMIZERS",
    "PRECISIONS",
    "SERVERS",
    "STRATEGIES",
    "USUAL_SEQUENCE",
    "Candidate",
    "Held",
    "MeshShape",
    "ModelShape",
    "PlanChoices",
    "Planned",
    "RankBytes",
    "StepTime",
    "Task",
    "Term",
    "TrainingPlan",
    "advice",
    "as_document",
    "asked_choices",
    "asked_task",
    "check_heads",
    "described",
    "four_digits",
    "fullest_rank",
    "gigabytes",
    "large",
    "plan",
    "reason",
    "scaling",
    "step_time",
    "transformer",
    "why",
]
