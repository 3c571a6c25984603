"""From a plan's patterns to layers: the last pattern that matches a layer's name counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.parallel.tensor._layer import LayerPlan, Place
from roundelay.parallel.tensor.axis import TensorAxis
from roundelay.parallel.tensor.column import Column
from roundelay.parallel.tensor.dropout import Dropout
from roundelay.parallel.tensor.embedding import Embedding
from roundelay.parallel.tensor.norm import Norm
from roundelay.parallel.tensor.qkv import Qkv
from roundelay.parallel.tensor.region import Gather, Region, Replicate, Split
from roundelay.parallel.tensor.row import Row

KINDS: dict[str, type[LayerPlan]] = {
    "column": Column,
    "dropout": Dropout,
    "embedding": Embedding,
    "gather": Gather,
    "norm": Norm,
    "qkv": Qkv,
    "region": Region,
    "replicate": Replicate,
    "row": Row,
    "split": Split,
}
SHOWN = 12  # names in a message


def kind_of(value: object) -> tuple[type[LayerPlan], str, frozenset[str]]:
    """Return what a value of a plan says: the kind, what follows its colon, and more words.

    >>> kind, argument, words = kind_of("column:head_dim gather")
    >>> kind.__name__, argument, sorted(words)
    ('Column', 'head_dim', ['gather'])
    """
    if not isinstance(value, str) or not value.split():
        raise InvalidArgumentError(f"values of a plan are words such as 'column', not {value!r}")
    first, *others = value.split()
    name, colon, argument = first.partition(":")
    if name not in KINDS:
        raise UnknownNameError("values of a plan", name, KINDS)
    kind = KINDS[name]
    if colon and not (kind.argued and argument):
        raise InvalidArgumentError(f"{value!r} says nothing with its colon")
    for word in others:
        if word not in kind.takes:
            raise UnknownNameError(f"words after {name!r}", word, kind.takes)
    return kind, argument, frozenset(others)


def layers_of(model: nn.Module, plan: Mapping[str, str], axis: TensorAxis) -> list[LayerPlan]:
    """Return what is done with every module that a pattern names."""
    modules = dict(model.named_modules())
    named = words_for(modules, plan)
    regions = {name for name, (kind, _, _) in named.items() if kind is Region}
    layers = []
    for name, (kind, argument, words) in named.items():
        around = list(_around(name))
        parents = tuple((parent, modules[parent]) for parent in around)
        inside = not regions.isdisjoint(around)
        layers.append(kind(Place(name, modules[name], parents, argument, words, inside, axis)))
    return layers


def words_for(
    names: Collection[str], plan: Mapping[str, str]
) -> dict[str, tuple[type[LayerPlan], str, frozenset[str]]]:
    """Return what a plan says of modules, by their names."""
    named: dict[str, tuple[type[LayerPlan], str, frozenset[str]]] = {}
    for pattern, value in plan.items():
        said = kind_of(value)
        named.update({name: said for name in names if fnmatchcase(name, pattern)})
    return named


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def problems_of(model: nn.Module, plan: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return what a plan misses: patterns that match no name, layers that nobody names."""
    matched = {pattern for pattern in plan if any(fnmatchcase(name, pattern) for name in names)}
    unmatched = [pattern for pattern in plan if pattern not in matched]
    unnamed = [
        name or "(the model itself)"
        for name, module in model.named_modules()
        if _needs_a_word(module) and not any(fnmatchcase(name, pattern) for pattern in plan)
    ]
    problems = _said_twice(model, plan)
    if not matched:
        problems.append("No pattern matches: it is the plan of another model.")
    if unmatched:
        problems.append(f"Patterns that match no module: {_listed(unmatched)}.")
    if unnamed:
        problems.append(
            f"Layers that no pattern names: {_listed(unnamed)}. Say 'replicate' for those that "
            f"every rank has."
        )
    return problems


def _said_twice(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Return modules that have several names, of which a plan says different words."""
    by_module: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        by_module.setdefault(module, []).append(name)
    found = []
    for names in (names for names in by_module.values() if len(names) > 1):
        said = words_for(names, plan)
        if len({*said.values()}) > 1:
            found.append(
                f"{' and '.join(said)} are one module, and the plan says different words of them."
            )
    return found


def _needs_a_word(module: nn.Module) -> bool:
    """Say whether a plan must tell what a module is: it has parameters, or draws masks."""
    drops = isinstance(module, _DropoutNd) and module.p > 0
    return drops or any(True for _ in module.parameters(recurse=False))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
