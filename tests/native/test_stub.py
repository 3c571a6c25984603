"""`_core.pyi` against what nanobind says of the core: the same names, arguments and types.

The stub is written by hand and may say more: names of arguments, what a tuple holds, which object.
It may say nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

import roundelay

_core = pytest.importorskip("roundelay._core")
stubgen = pytest.importorskip("nanobind.stubgen")
if not hasattr(_core, "World"):
    pytest.skip("half of the core needs Linux", allow_module_level=True)

Members = dict[str, ast.stmt]
NOTHING = ast.Constant(None)


def members(body: list[ast.stmt]) -> Members:
    """By name: functions, classes and values; not what is imported or private to the stub."""
    found: Members = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return {name: node for name, node in found.items() if name[0] != "_" or name == "__init__"}


def without_none(kind: ast.expr) -> ast.expr:
    """`A` of `A | None`: nanobind does not tell whether a pointer may be null."""
    if isinstance(kind, ast.BinOp) and ast.unparse(kind.right) == "None":
        return kind.left
    return kind


def fits(said: ast.expr | None, real: ast.expr | None) -> bool:
    """Tell whether a type in the stub is the one that nanobind gives, or says more than it."""
    said, real = without_none(said or NOTHING), without_none(real or NOTHING)
    if ast.unparse(said) == "None" or ast.unparse(real) == "None":
        return ast.unparse(said) == ast.unparse(real)
    if ast.unparse(said) == "Any" or ast.unparse(real) == "object":
        return True
    if isinstance(said, ast.Subscript):
        same = ast.unparse(said.value) == ast.unparse(
            real.value if isinstance(real, ast.Subscript) else real
        ).replace("Sequence", "list")
        return same and (not isinstance(real, ast.Subscript) or all_fit(said.slice, real.slice))
    return ast.unparse(said) == ast.unparse(real)


def all_fit(said: ast.expr, real: ast.expr) -> bool:
    some, others = (one.elts if isinstance(one, ast.Tuple) else [one] for one in (said, real))
    return len(some) == len(others) and all(map(fits, some, others))


Argument = tuple[ast.arg, str, ast.expr | None]


def arguments(function: ast.FunctionDef) -> list[Argument]:
    """Every argument, how it is given, and its default."""
    given = function.args
    placed = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(placed) - len(given.defaults)), *given.defaults]
    return [
        *((arg, "by place", default) for arg, default in zip(placed, defaults, strict=True)),
        *((arg, "by name", default)
          for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)),
    ]  # fmt: skip


def argument_offences(said: Argument | None, real: Argument | None) -> Iterator[str]:
    if said is None or real is None:
        yield "has another number of arguments"
        return
    (arg, way, default), (true, true_way, true_default) = said, real
    if arg.arg != true.arg and not true.arg.startswith("arg"):
        yield f"calls {true.arg} {arg.arg}"
    if way != true_way:
        yield f"gives {arg.arg} {way}"
    if default is None or true_default is None:
        if default is not true_default:
            yield f"is wrong about a default of {arg.arg}"
    elif ast.unparse(default) not in ("...", ast.unparse(true_default)):
        yield f"has another default of {arg.arg}"
    if arg.arg != "self" and not fits(arg.annotation, true.annotation):
        yield f"has another type of {arg.arg}"


def decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(one) for one in function.decorator_list}


def function_offences(said: ast.stmt, real: ast.FunctionDef) -> Iterator[str]:
    if isinstance(said, ast.AnnAssign) and "property" in decorators(real):
        if not fits(said.annotation, real.returns):
            yield f"is {ast.unparse(said.annotation)}"
        return
    if not isinstance(said, ast.FunctionDef) or decorators(said) != decorators(real):
        yield "is another kind of thing"
        return
    if not fits(said.returns, real.returns):
        yield "returns another type"
    if said.args.vararg is None:  # else it leaves the arguments to its only caller
        for pair in zip_longest(arguments(said), arguments(real)):
            yield from argument_offences(*pair)


def offences(said: Members, real: Members) -> Iterator[str]:
    """Yield how a stub differs from the real thing."""
    yield from (f"{name} is missing" for name in real.keys() - said.keys())
    yield from (f"{name} is not there" for name in said.keys() - real.keys())
    for name in said.keys() & real.keys():
        one, other = said[name], real[name]
        found: Iterator[str] = iter(())
        if isinstance(other, ast.FunctionDef):
            found = function_offences(one, other)
        elif isinstance(one, ast.ClassDef) and isinstance(other, ast.ClassDef):
            found = offences(members(one.body), members(other.body))
            if [*map(ast.unparse, one.bases)] != [*map(ast.unparse, other.bases)]:
                yield f"{name} has another base"
        elif not (
            isinstance(one, ast.AnnAssign)
            and isinstance(other, ast.AnnAssign)
            and fits(one.annotation, other.annotation)
        ):
            yield f"{name} is another kind of thing"
        yield from (f"{name}: {one}" for one in found)


def test_the_stub_says_what_the_core_has() -> None:
    generator = stubgen.StubGen(_core)
    generator.put(_core)
    real = members(ast.parse(generator.get()).body)
    stub = Path(roundelay.__file__).with_name("_core.pyi").read_text(encoding="utf-8")
    said = members(ast.parse(stub).body)
    if not hasattr(_core, "jax_handler"):
        del said["jax_handler"]  # of builds beside which there was JAX
    assert len(real) > 30
    assert sorted(offences(said, real)) == []


REAL = """
class Group:
    def __init__(self, arg: World, /) -> None: ...
    @property
    def calls(self) -> int: ...
    @staticmethod
    def bytes_for(size: int, slots: int = 2) -> int: ...
    def moved(self, arg0: int, arg1: Sequence[int], /) -> tuple: ...
    def wait(self, on_slow: object, *, number: int | None = None) -> Group: ...
class Closed(Exception): ...
"""
SAME = """
class Group:
    def __init__(self, world: World) -> None: ...
    calls: int
    @staticmethod
    def bytes_for(size: int, slots: int = ...) -> int: ...
    def moved(self, rank: int, to: list[int]) -> tuple[int, int]: ...
    def wait(self, on_slow: Slow, *, number: int | None = None) -> Group | None: ...
class Closed(Exception): ...
"""


def test_the_checker_lets_a_stub_say_more() -> None:
    assert list(offences(members(ast.parse(SAME).body), members(ast.parse(REAL).body))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Closed(Exception): ...", ""),
        ("class Closed(Exception): ...", "class Closed: ..."),
        ("class Closed(Exception): ...", "class Closed(Exception): ...\nmore: int"),
        ("class Closed(Exception): ...", "Closed: int"),
        ("calls: int", ""),
        ("calls: int", "calls: str"),
        ("calls: int", "def calls(self) -> int: ..."),
        ("world: World", "world: Group"),
        ("world: World", "world: World, rank: int"),
        ("size: int, ", ""),
        ("size: int", "count: int"),
        ("slots: int = ...", "slots: int"),
        ("slots: int = ...", "slots: int = 3"),
        ("slots: int", "slots: str"),
        ("    @staticmethod\n", ""),
        ("-> tuple[int, int]", "-> list[int]"),
        ("-> tuple[int, int]", "-> None"),
        ("list[int]", "list[str]"),
        ("list[int]", "int"),
        ("*, number", "number"),
        ("Group | None", "None"),
    ],
)
def test_the_checker_sees_what_is_wrong(old: str, new: str) -> None:
    wrong = SAME.replace(old, new)
    assert wrong != SAME
    assert list(offences(members(ast.parse(wrong).body), members(ast.parse(REAL).body)))
