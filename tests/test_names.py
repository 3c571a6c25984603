"""What names promise: an underscore is private, and a class name means one thing in the package."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundelay

PACKAGE = Path(roundelay.__file__).parent
TREES = {
    path.relative_to(PACKAGE.parent): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(tree: ast.AST) -> Iterator[list[str]]:
    """Yield the parts of every name that a file imports, also for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            yield from ([*module, alias.name] for alias in node.names)


def reaches(file: Path, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the package of a file with what it imports that is private elsewhere.

    What begins with an underscore belongs to the package or module that it lies in, and to all
    that lies in there.
    """
    own = list(file.parent.parts)
    for parts in imported(tree):
        for at, part in enumerate(parts):
            if parts[0] == "roundelay" and part.startswith("_") and not part.startswith("__"):
                if own[:at] != parts[:at]:
                    yield ".".join(own), ".".join(parts[: at + 1])
                break


def test_an_underscore_is_private() -> None:
    found = {reach for file, tree in TREES.items() for reach in reaches(file, tree)}
    assert found == set(), "give it a public name, or don't reach for it"


@pytest.mark.parametrize(
    ("file", "line", "private"),
    [
        ("roundelay/cli/run.py", "from roundelay.engines._base import Engine", True),
        ("roundelay/cli/run.py", "from roundelay.engines import _base", True),
        ("roundelay/cli/run.py", "import roundelay.engines._base", True),
        ("roundelay/cli/run.py", "from roundelay.engines.reference import _fold", True),
        ("roundelay/engines/threads.py", "from roundelay.engines.reference import _fold", True),
        ("roundelay/engines/threads.py", "from roundelay.engines.mpi._rank import main", True),
        ("roundelay/engines/threads.py", "from roundelay.engines._base import Engine", False),
        ("roundelay/engines/mpi/engine.py", "from roundelay.engines._base import Engine", False),
        ("roundelay/cli/run.py", "from roundelay import _core, __version__", False),
        ("roundelay/cli/run.py", "from os import _exit", False),
    ],
)
def test_the_checker_sees_what_is_private(file: str, line: str, *, private: bool) -> None:
    assert bool(list(reaches(Path(file), ast.parse(line)))) is private


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    found = {name: n for name, n in names.items() if n > 1}
    assert found == {}, "call it by a name that no other class has"
