"""Layer 4: how a pipeline's ranks take turns; one schedule per file, and what is done with them.

A pipeline schedule is data, too: per rank a list of what it computes, of which micro-batch, for
which stage. It is proved, priced, drawn and written as JSON here, and run by `rd.Pipeline`.
"""

from roundelay.pipelines._base import (
    PipelineAction,
    PipelineMaker,
    PipelineSchedule,
    pipeline_called,
    pipelines,
)
from roundelay.pipelines._file import (
    load_pipeline,
    pipeline_from_json,
    pipeline_to_json,
    save_pipeline,
)
from roundelay.pipelines._made import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_STAGES,
    bubble_formula,
    pipeline_for,
)
from roundelay.pipelines._price import PipelinePrice, StageCosts, price_pipeline
from roundelay.pipelines._prove import (
    PipelineFailure,
    PipelineProof,
    find_pipeline_failures,
    prove_pipeline,
)
from roundelay.pipelines._replay import PipelineSpan

__all__ = [
    "DEFAULT_MICRO_BATCHES",
    "DEFAULT_STAGES",
    "PipelineAction",
    "PipelineFailure",
    "PipelineMaker",
    "PipelinePrice",
    "PipelineProof",
    "PipelineSchedule",
    "PipelineSpan",
    "StageCosts",
    "bubble_formula",
    "find_pipeline_failures",
    "load_pipeline",
    "pipeline_called",
    "pipeline_for",
    "pipeline_from_json",
    "pipeline_to_json",
    "pipelines",
    "price_pipeline",
    "prove_pipeline",
    "save_pipeline",
]
