"""Roundelay for Ray, by the name that users know: `rd.ray`, or `import roundelay.ray`."""

from typing import TYPE_CHECKING

from roundelay.fronts import ray as _front

if TYPE_CHECKING:
    from roundelay.fronts.ray import (
        RoundelayConfig,
        RoundelayGroup,
        RoundelayTrainer,
        register,
        run,
    )

__all__ = ["RoundelayConfig", "RoundelayGroup", "RoundelayTrainer", "register", "run"]


def __getattr__(name: str) -> object:
    return getattr(_front, name)


def __dir__() -> list[str]:
    return dir(_front)
