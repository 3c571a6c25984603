"""What a model was before it was cut into stages, of which a rank has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.communicator import Communicator

__all__ = ["Staging", "is_pipeline", "stage_model", "staging_of"]


@dataclass(frozen=True)
class Staging:
    """The names of the whole model, in its order, and the ranks that have its stages."""

    comm: Communicator
    names: dict[str, str]  # of every parameter, each with the first one of the same parameter
    keys: tuple[str, ...]  # of its state dict
    modules: tuple[str, ...]  # all names of them
    told: str  # how it was cut and is run, in words that ranks compare
    #: Raises, on every rank, if copies of a parameter that stages share differ; all call it.
    compare_copies: Callable[[], None]
    #: Look at what each stage gives, and hand it on: the stage, its output, whether it is the last.
    looks: list[Callable[[int, Any, bool], Any]] = field(default_factory=list)

    def looked_at(self, stage: int, run: Callable[..., Any], *, last: bool) -> Callable[..., Any]:
        """Return the program of a stage, with looks at what it gives."""

        def run_and_look(*values: Any) -> Any:
            output = run(*values)
            for look in self.looks:
                output = look(stage, output, last)
            return output

        return run_and_look


def stage_model(
    part: torch.nn.Module,
    whole: torch.nn.Module,
    comm: Communicator,
    told: str,
    compare_copies: Callable[[], None],
) -> Staging:
    """Note on what a rank has of which model it is a part."""
    first: dict[torch.Tensor, str] = {}
    names = {
        name: first.setdefault(one, name)
        for name, one in whole.named_parameters(remove_duplicate=False)
    }
    modules = tuple(name for name, _ in whole.named_modules())
    keys = tuple(whole.state_dict())
    staging = Staging(comm, names, keys, modules, told, compare_copies)
    vars(part)["_staging"] = staging

    def leave_out(module: torch.nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take the whole model's state, too, for that of these stages."""
        here = module.state_dict(prefix=prefix, keep_vars=True).keys()
        for name in {prefix + key for key in keys}.intersection(given).difference(here):
            del given[name]

    part.register_load_state_dict_pre_hook(leave_out)  # type: ignore[no-untyped-call]
    return staging


def staging_of(model: torch.nn.Module) -> Staging | None:
    """Return how a model was cut into stages on several ranks; None if it was not."""
    staging: Staging | None = vars(model).get("_staging")
    return None if staging is None or staging.comm.size == 1 else staging


def is_pipeline(model: torch.nn.Module) -> bool:
    """Tell whether a model is stages that `step` trains: also if one rank has all of them."""
    return "_staging" in vars(model)
