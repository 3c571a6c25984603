"""Roundelay for Ray: a backend of Ray Train, functions on actors, and `ray.util.collective`.

Users reach it as `rd.ray`. Nothing of Ray is imported before one of the names is asked for.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from roundelay.errors import MissingPackageError

if TYPE_CHECKING:
    from roundelay.fronts.ray.actors import run
    from roundelay.fronts.ray.collective import RoundelayGroup, register
    from roundelay.fronts.ray.train import RoundelayConfig, RoundelayTrainer

__all__ = ["RoundelayConfig", "RoundelayGroup", "RoundelayTrainer", "register", "run"]

_WHERE = {
    "RoundelayConfig": "train",
    "RoundelayGroup": "collective",
    "RoundelayTrainer": "train",
    "register": "collective",
    "run": "actors",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'roundelay.ray' has no attribute {name!r}")
    try:
        module = _import_module(f"roundelay.fronts.ray.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("ray", "pyarrow"):  # of Ray's own extra [train]
            raise
        raise MissingPackageError(f"rd.ray.{name}", package, "ray") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
