"""Collective communication and data-parallel training, where every algorithm is data."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from roundelay.errors import RoundelayError

if TYPE_CHECKING:
    from roundelay.communicator import ANY, Communicator
    from roundelay.launch import init, run
    from roundelay.reductions import Located, Op

__all__ = [
    "ANY",
    "Communicator",
    "Located",
    "Op",
    "RoundelayError",
    "__version__",
    "init",
    "run",
]

__version__ = _version("roundelay")

#: Loaded when first asked for: looking at algorithms needs neither numpy nor the native core.
_WHERE = {
    "ANY": "communicator",
    "Communicator": "communicator",
    "Located": "reductions",
    "Op": "reductions",
    "init": "launch",
    "run": "launch",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'roundelay' has no attribute {name!r}")
    return getattr(_import_module(f"roundelay.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
