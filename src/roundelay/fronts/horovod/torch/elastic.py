"""`hvd.elastic`: refused, because ranks that are left can't form a smaller group and go on."""

from __future__ import annotations

from typing import Any, NoReturn

from roundelay.fronts.horovod.errors import UnsupportedOperationError

__all__ = ["ElasticSampler", "TorchState", "run"]

#: What else Horovod has here.
OTHERS = (
    *("State", "ObjectState", "StateHandler", "ModelStateHandler", "OptimizerStateHandler"),
    *("SamplerStateHandler", "init"),
)
WAY = (
    "After the loss of a rank the group can't be repaired, so there is nothing to go on with. Let "
    "the launcher start all ranks again (torchrun --max-restarts, `roundelay run --max-restarts`), "
    "and begin from a checkpoint: rd.save, rd.latest_checkpoint, rd.load."
)


def _refuse(name: str) -> NoReturn:
    raise UnsupportedOperationError(f"hvd.elastic.{name}: {WAY}")


def __getattr__(name: str) -> NoReturn:
    """Refuse whatever else Horovod has here."""
    if name not in OTHERS:
        raise AttributeError(f"hvd.elastic has no {name!r}")
    _refuse(name)


def run(func: Any) -> NoReturn:
    """Refuse to run a function again with fewer ranks."""
    del func
    _refuse("run")


def TorchState(*_: Any, **__: Any) -> NoReturn:  # noqa: N802 - Horovod's name
    """Refuse to keep a state for other ranks to come."""
    _refuse("TorchState")


def ElasticSampler(*_: Any, **__: Any) -> NoReturn:  # noqa: N802 - Horovod's name
    """Refuse to divide a dataset anew."""
    _refuse("ElasticSampler")
