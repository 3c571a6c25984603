"""Collective communication and data-parallel training, where every algorithm is data."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from roundelay.errors import MissingPackageError, NoEngineError, RoundelayError

if TYPE_CHECKING:
    from roundelay import jax as jax
    from roundelay import ray as ray
    from roundelay.communicator import ANY, Communicator
    from roundelay.communicator.arena_arrays import arena_arrays
    from roundelay.launch import init, run
    from roundelay.launch.verify import verify
    from roundelay.parallel.context.attention import attention
    from roundelay.parallel.context.context_parallel import context_parallel
    from roundelay.parallel.context.layout import (
        sequence_positions,
        shard_sequence,
        unshard_sequence,
    )
    from roundelay.parallel.cut_tensor import local
    from roundelay.parallel.expert import MoE, Router
    from roundelay.parallel.mesh import Mesh
    from roundelay.parallel.pipeline import Pipeline
    from roundelay.parallel.tensor.cross_entropy import cross_entropy
    from roundelay.parallel.tensor.plan import apply_plan
    from roundelay.processes.death import ServerFinished
    from roundelay.reductions import Located, Op
    from roundelay.training.checkpoint.export import export
    from roundelay.training.checkpoint.keep import latest_checkpoint
    from roundelay.training.checkpoint.load import load
    from roundelay.training.checkpoint.read_checkpoint import read_checkpoint
    from roundelay.training.checkpoint.save import save
    from roundelay.training.evaluate import evaluate
    from roundelay.training.ledger import Ledger, ledger
    from roundelay.training.loader import Loader, loader
    from roundelay.training.materialize import materialize, materialize_later
    from roundelay.training.precision import Precision
    from roundelay.training.prepare import prepare
    from roundelay.training.scheduler import scheduler
    from roundelay.training.staleness import Staleness, staleness
    from roundelay.training.state import full_state_dict, whole_tensors
    from roundelay.training.steps import accumulate, backward
    from roundelay.training.strategies.ddp import Ddp
    from roundelay.training.strategies.parameter_server import ParameterServer
    from roundelay.training.strategies.zero import Zero
    from roundelay.training.sync_batch_norm import SyncBatchNorm
    from roundelay.training.unprepare import unprepare
    from roundelay.training.whole import whole
    from roundelay.view.explain import Explanation, explain

__all__ = [
    "ANY",
    "Communicator",
    "Ddp",
    "Explanation",
    "Ledger",
    "Loader",
    "Located",
    "Mesh",
    "MoE",
    "Op",
    "ParameterServer",
    "Pipeline",
    "Precision",
    "RoundelayError",
    "Router",
    "ServerFinished",
    "Staleness",
    "SyncBatchNorm",
    "Zero",
    "__version__",
    "accumulate",
    "apply_plan",
    "arena_arrays",
    "attention",
    "backward",
    "context_parallel",
    "cross_entropy",
    "evaluate",
    "explain",
    "export",
    "full_state_dict",
    "init",
    "latest_checkpoint",
    "ledger",
    "load",
    "loader",
    "local",
    "materialize",
    "materialize_later",
    "prepare",
    "read_checkpoint",
    "run",
    "save",
    "scheduler",
    "sequence_positions",
    "shard_sequence",
    "staleness",
    "unprepare",
    "unshard_sequence",
    "verify",
    "whole",
    "whole_tensors",
]

__version__: str  # read from the package's metadata when first asked for

#: Loaded when first asked for: looking at algorithms needs neither numpy nor the native core.
_WHERE = {
    "ANY": "communicator",
    "Communicator": "communicator",
    "Ddp": "training.strategies.ddp",
    "Explanation": "view.explain",
    "Ledger": "training.ledger",
    "Loader": "training.loader",
    "Located": "reductions",
    "Mesh": "parallel.mesh",
    "MoE": "parallel.expert",
    "Op": "reductions",
    "ParameterServer": "training.strategies.parameter_server",
    "Pipeline": "parallel.pipeline",
    "Precision": "training.precision",
    "Router": "parallel.expert",
    "ServerFinished": "processes.death",
    "Staleness": "training.staleness",
    "SyncBatchNorm": "training.sync_batch_norm",
    "Zero": "training.strategies.zero",
    "accumulate": "training",
    "apply_plan": "parallel.tensor.plan",
    "arena_arrays": "communicator.arena_arrays",
    "attention": "parallel.context.attention",
    "backward": "training",
    "context_parallel": "parallel.context.context_parallel",
    "cross_entropy": "parallel.tensor.cross_entropy",
    "evaluate": "training.evaluate",
    "explain": "view.explain",
    "export": "training.checkpoint.export",
    "full_state_dict": "training",
    "init": "launch",
    "latest_checkpoint": "training.checkpoint.keep",
    "ledger": "training",
    "load": "training.checkpoint.load",
    "loader": "training",
    "local": "parallel.cut_tensor",
    "materialize": "training.materialize",
    "materialize_later": "training.materialize",
    "prepare": "training",
    "read_checkpoint": "training.checkpoint.read_checkpoint",
    "run": "launch",
    "save": "training.checkpoint.save",
    "scheduler": "training.scheduler",
    "sequence_positions": "parallel.context.layout",
    "shard_sequence": "parallel.context.layout",
    "staleness": "training.staleness",
    "unprepare": "training.unprepare",
    "unshard_sequence": "parallel.context.layout",
    "verify": "launch.verify",
    "whole": "training.whole",
    "whole_tensors": "training.state",
}

#: Doors from other libraries, each a module of its own: `rd.jax.all_reduce`.
_FRONTS = ("jax", "ray")


def __getattr__(name: str) -> object:
    if name in _FRONTS:
        return _import_module(f"roundelay.{name}")
    if name == "_core":  # whoever needs ranks imports it from here
        return _native_core()
    if name == "__version__":
        return _import_module("importlib.metadata").version("roundelay")
    if name not in _WHERE:
        raise AttributeError(f"module 'roundelay' has no attribute {name!r}")
    try:
        module = _import_module(f"roundelay.{_WHERE[name]}")
    except ModuleNotFoundError as error:  # a MissingPackageError, or what torch's own import says
        if error.name != "torch" and not isinstance(error, MissingPackageError):
            raise
        raise MissingPackageError(f"rd.{name}", error.name or "torch") from None
    found = globals()[name] = getattr(module, name)  # the next time, no import is asked for
    return found


def _native_core() -> object:
    try:
        return _import_module("roundelay._core")
    except ModuleNotFoundError as error:
        if error.name != "roundelay._core":
            raise
        raise NoEngineError from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FRONTS})
