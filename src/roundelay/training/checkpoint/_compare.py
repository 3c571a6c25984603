"""Whether a checkpoint is one of this model and optimizer, and if not, everything that differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from roundelay.errors import InvalidArgumentError
from roundelay.training._run import Run
from roundelay.training.checkpoint._manifest import Manifest, Optimizer
from roundelay.training.checkpoint._write import aliases_of, buffers_of, modules_with_extra
from roundelay.training.checkpoint.window import shapes_of

Shapes = Mapping[str, tuple[int, ...]]
EXTRA_STATE = "_extra_state"
#: New prefixes of names by the old ones, or what makes a new name of an old one.
Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(slots=True)
class Differences:
    """What a model and its optimizer have otherwise than a checkpoint: in words, and by name."""

    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # here, and not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, and not here
    reshaped: list[str] = field(default_factory=list)
    elsewhere: Collection[str] = ()  # what other stages of a pipeline have
    optimizer: bool = False  # whether state of its parameters can't be taken
    groups: bool = False  # whether options of its groups can't be taken

    def shapes(self, kind: str, here: Shapes, there: Shapes) -> None:
        """Compare names and shapes of parameters or buffers."""
        for name, shape in here.items():
            if name not in there:
                self.missing.append(name)
                self.lines.append(f"{kind} {name}: {shape} here, not in the checkpoint")
            elif there[name] != shape:
                self.reshaped.append(name)
                self.lines.append(f"{kind} {name}: {shape} here, {there[name]} in the checkpoint")
        for name, shape in there.items():
            if name not in here and name not in self.elsewhere:
                self.unexpected.append(name)
                self.lines.append(f"{kind} {name}: {shape} in the checkpoint, not here")

    @property
    def untouched(self) -> set[str]:
        """What is here and can't be taken from the checkpoint."""
        return {*self.missing, *self.reshaped}


def compare(manifest: Manifest, run: Run, *, optimizer: bool, scheduler: bool) -> Differences:
    """Return in what the checkpoint does not fit what is being trained."""
    model = run.setup.model
    shared = aliases_of(model)
    here = shapes_of(run.setup)
    here.update({other: here[name] for other, name in shared.items()})
    there = {name: tuple(entry.shape) for name, entry in manifest.parameters.items()}
    there.update({other: there[name] for other, name in manifest.aliases.items() if name in there})
    found = Differences(elsewhere=set() if run.setup.mesh is None else run.setup.mesh.elsewhere)
    found.shapes("parameter", here, there)
    for other, name in shared.items():
        own, first = (manifest.aliases.get(one, one) for one in (other, name))
        if other in there and name in there and own != first:
            found.lines.append(f"parameter {other}: shared with {name} here, not in the checkpoint")
    found.shapes(
        "buffer",
        {name: tuple(one.shape) for name, one in buffers_of(model)},
        {name: tuple(entry.shape) for name, entry in manifest.buffers.items()},
    )
    found.lines += [
        f"module {name}: has extra state here, none in the checkpoint"
        for name, _ in modules_with_extra(model)
        if name not in manifest.modules
    ]
    if optimizer:
        _compare_optimizers(manifest, run, found)
    if scheduler and manifest.scheduler is None:
        found.lines.append("scheduler: given here, none in the checkpoint")
    return found


def _compare_optimizers(manifest: Manifest, run: Run, found: Differences) -> None:
    word = run.setup.optimizer.name
    if not manifest.optimizers:
        found.optimizer = found.groups = True
        found.lines.append(
            f"optimizer: {word} here, none in the checkpoint, which has weights only. Load it "
            f"without the optimizer, rd.load(path, model), to begin with a new one"
        )
        return
    own = manifest.optimizers[0]
    if word != own.kind:
        found.optimizer = found.groups = True
        found.lines.append(f"optimizer: {word} here, {own.kind} in the checkpoint")
    lines = list(_groups(manifest, own, run))
    found.groups = found.groups or bool(lines)
    found.lines += lines


def _groups(manifest: Manifest, own: Optimizer, run: Run) -> Iterator[str]:
    """Compare groups, on the parameters that both have: others are told of anyway."""
    setup = run.setup
    here = {name: parameter.group for parameter in setup.parameters for name in parameter.names}
    there = {name: at for at, group in enumerate(own.groups) for name in group.names}
    for other, name in manifest.aliases.items():
        if name in there:
            there[other] = there[name]
    ours = {name for name, _ in setup.model.named_parameters(remove_duplicate=False)}
    theirs = {*manifest.parameters, *manifest.aliases}
    count = len(setup.optimizer.param_groups)
    if count != len(own.groups):
        yield f"optimizer: {count} groups here, {len(own.groups)} in the checkpoint"
    for name, group in here.items():
        if name in theirs and name not in there:
            yield f"parameter {name}: trained here, frozen in the checkpoint"
        elif name in theirs and there[name] != group:
            yield f"parameter {name}: in group {group} here, {there[name]} in the checkpoint"
    for name in there:
        if name in ours and name not in here:
            yield f"parameter {name}: frozen here, trained in the checkpoint"


def renamed(manifest: Manifest, rename: Rename | None) -> tuple[Manifest, dict[str, str]]:
    """Return a manifest under new names, and what each was before."""
    if rename is None:
        return manifest, {}
    words = [] if callable(rename) else _words(rename)
    if not all(isinstance(one, str) for one in words):
        raise InvalidArgumentError(
            f"rename of load is a dict of prefixes, old to new, or a function, not {rename!r}."
        )
    old: dict[str, str] = {}

    def new(name: str) -> str:
        made = rename(name) if callable(rename) else _by_prefix(name, rename)
        if old.setdefault(made, name) != name:
            raise InvalidArgumentError(
                f"rename of load gives {old[made]} and {name} of the checkpoint one name, {made}."
            )
        return made

    def keys(table: Mapping[str, Any]) -> dict[str, Any]:
        return {new(name): value for name, value in table.items()}

    seen = msgspec.structs.replace(
        manifest,
        parameters=keys(manifest.parameters),
        aliases={new(other): new(name) for other, name in manifest.aliases.items()},
        buffers=keys(manifest.buffers),
        modules={
            _module(new(extra_state_key(name))): value for name, value in manifest.modules.items()
        },
        optimizers=[
            msgspec.structs.replace(
                optimizer,
                groups=[
                    msgspec.structs.replace(each, names=[new(name) for name in each.names])
                    for each in optimizer.groups
                ],
            )
            for optimizer in manifest.optimizers
        ],
    )
    before = {name: was for name, was in old.items() if name != was}
    before |= {_module(name): _module(was) for name, was in before.items() if name != _module(name)}
    return seen, before


def extra_state_key(module: str) -> str:
    """Return what a state dict calls the extra state of a module."""
    return f"{module}.{EXTRA_STATE}" if module else EXTRA_STATE


def _module(name: str) -> str:
    """Return the module again; other names as they are."""
    return name.removesuffix(EXTRA_STATE).removesuffix(".") if name.endswith(EXTRA_STATE) else name


def _words(prefixes: Any) -> list[Any]:  # Any: a dict, or a mistake to be named
    return [*prefixes, *prefixes.values()] if isinstance(prefixes, Mapping) else [prefixes, None]


def _by_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
    if not fitting:
        return name
    longest = max(fitting, key=len)
    return prefixes[longest] + name[len(longest) :]
