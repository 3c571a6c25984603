"""A function in a user's script, named as train.py:job."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from roundelay.errors import InvalidArgumentError


def function_at(place: str, command: str, example: str) -> Callable[[], Any]:  # whatever it makes
    """Load a file and return one of its functions."""
    name, colon, function = place.rpartition(":")
    if colon and function.isidentifier() and not Path(name).is_file():
        what = "it is a folder" if Path(name).is_dir() else "there is no such file"
        raise InvalidArgumentError(f"{command} {place}: can't read {name}, {what}.")
    if not colon or not function.isidentifier():
        raise InvalidArgumentError(
            f"{command} takes a file and a function in it, as train.py:{example}, not {place!r}."
        )
    found = getattr(_loaded(Path(name)), function, None)
    if not callable(found):
        raise InvalidArgumentError(f"{name} has no function {function!r}.")
    made: Callable[[], Any] = found
    return made


def _loaded(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent.resolve()))  # for what it imports from beside it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
