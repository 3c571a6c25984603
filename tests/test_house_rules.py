"""The rules of the house, read off the source: who may import whom, and what nobody does."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundelay
from roundelay.registry import Family

PACKAGE = Path(roundelay.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}

#: Imports go down only. The package's own `__init__` stands at the top, and so does any name of it.
LAYERS = {
    "arguments": 0, "errors": 0, "html_table": 0, "language": 0, "registry": 0, "signals": 0,
    "collectives": 1,
    "schedule": 2, "contraction": 2,
    "networks": 3,
    "algorithms": 4, "pipelines": 4, "planning": 4,
    "engines": 5, "processes": 5, "rendezvous": 5, "reductions": 5, "_core": 5, "_typing": 5,
    "live": 5, "records": 5,
    "communicator": 6, "tuning": 6, "values": 6,
    "training": 7, "parallel": 7, "torch": 7, "torch_autoload": 7,
    "view": 8,
    "cli": 9, "launch": 9, "bench": 9, "web": 9, "__main__": 9, "fronts": 9,
    "horovod": 9, "jax": 9, "ray": 9,
    "__init__": 9,
}  # fmt: skip
STANDARD_LIBRARY_ONLY = range(5)
MAY_IMPORT_TORCH = (
    "torch/", "training/", "parallel/", "engines/gloo/", "engines/nccl/", "bench/peer_gloo.py",
    "fronts/horovod/torch/",
)  # fmt: skip
#: The one place that knows pickle; whoever wants it there says so.
MAY_IMPORT_PICKLE = "processes/wire.py"
#: The one that writes a file of it, as torch's analyzer wants, and reads none.
WRITES_PICKLE = "view/flight_recorder.py"
#: What may not import what, though it lies below.
NEVER = [("engines", "algorithms"), ("view", "engines")]
MAX_LINES = 400


def top(module: str) -> str:
    """`schedule` of `schedule/price.py` and of `roundelay.schedule.price`."""
    return module.removeprefix("roundelay.").replace("/", ".").removesuffix(".py").split(".")[0]


#: By this msgspec makes what it needs for a type at first use; threads that do so at once crash it.
#: A decoder is made when a module is imported: `_read = msgspec.json.Decoder(Told).decode`.
BY_TYPE = re.compile(r"msgspec\.(json\.decode|msgpack\.decode|convert)\([^)]*\btype=")


@pytest.mark.parametrize("name", FILES)
def test_decoders_are_made_at_import(name: str) -> None:
    assert not BY_TYPE.search(FILES[name].read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports when it runs, wherever in it; not those for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from roundelay import errors` names a module too.
            yield from (
                f"{module}.{alias.name}" if module == "roundelay" else module
                for alias in node.names
            )
        else:
            yield from imports(node)


def import_offences(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield how a file breaks the order of the layers."""
    own = top(file)
    layer = LAYERS[own]
    for module in imports(tree):
        if module.startswith("."):
            yield f"{file} imports {module}: say roundelay.… in full"
        elif module == "roundelay" or module.startswith("roundelay."):
            target = top(module)
            if LAYERS.get(target, LAYERS["__init__"]) > layer:
                yield f"{file} (layer {layer}) imports {module}, which lies above it"
            if (own, target) in NEVER:
                yield f"{file} imports {module}; {own} and {target} meet in the schedule only"
        elif layer in STANDARD_LIBRARY_ONLY and top(module) not in sys.stdlib_module_names:
            yield f"{file} (layer {layer}) imports {module}: the standard library only, up to 4"
        elif top(module) == "torch" and not file.startswith(MAY_IMPORT_TORCH):
            yield f"{file} imports torch"


def word_offences(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield what has no place in the package."""
    for module in imports(tree):
        allowed = module == "pickle" and file in (MAY_IMPORT_PICKLE, WRITES_PICKLE)
        if module in ("pickle", "marshal", "shelve") and not allowed:
            yield f"{file} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"{file}:{node.lineno} asserts: raise from roundelay.errors instead"
        called = node.func.id if isinstance(node, ast.Call) and isinstance(
            node.func, ast.Name) else None  # fmt: skip
        if called in ("eval", "exec") or (called == "print" and top(file) != "cli"):
            yield f"{file} calls {called}"


@pytest.mark.parametrize("file", FILES)
def test_every_file_keeps_to_the_rules(file: str) -> None:
    assert top(file) in LAYERS, f"say in {Path(__file__).name} which layer {file} is in"
    text = FILES[file].read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert [*import_offences(file, tree), *word_offences(file, tree)] == []
    assert ast.get_docstring(tree), f"{file} does not say what it is for"
    assert len(text.splitlines()) <= MAX_LINES, f"{file} has more than one idea"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("view/html.py", "from roundelay import __version__"),
        ("errors.py", "from roundelay.schedule import Transfer"),
        ("schedule/price.py", "from roundelay.networks import networks"),
        ("schedule/price.py", "from roundelay import networks"),
        ("schedule/price.py", "import roundelay"),
        ("schedule/price.py", "import numpy as np"),
        ("algorithms/new.py", "import numpy.linalg"),
        ("algorithms/new.py", "def late():\n    from roundelay.engines import engines"),
        ("algorithms/new.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("engines/threads.py", "from roundelay.algorithms.all_reduce_ring import all_reduce_ring"),
        ("engines/threads.py", "import torch"),
        ("view/html.py", "from roundelay.cli import main"),
        ("view/html.py", "from roundelay.engines.reference import Reference"),
        ("view/html.py", "from . import picture"),
        ("communicator.py", "from torch import nn"),
        ("communicator/objects.py", "from roundelay.launch import init"),
        ("bench/rounds.py", "import torch"),
    ],
)
def test_the_checker_sees_imports_that_go_up(file: str, line: str) -> None:
    assert len(list(import_offences(file, ast.parse(line)))) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("errors.py", "import difflib"),
        ("errors.py", "if TYPE_CHECKING:\n    from roundelay.schedule import Failure"),
        ("schedule/price.py", "from roundelay.schedule.layout import Layout"),
        ("engines/threads.py", "import numpy as np\nfrom roundelay.schedule import Schedule"),
        ("engines/gloo/groups.py", "import torch.distributed"),
        ("bench/peer_gloo.py", "import torch.distributed"),
        ("launch/local.py", "from roundelay.communicator import Communicator"),
        ("training/zero.py", "import torch"),
        ("cli/list.py", "from roundelay.algorithms import algorithms\nimport click"),
        ("cli/list.py", "from roundelay import __version__"),
    ],
)
def test_the_checker_lets_imports_go_down(file: str, line: str) -> None:
    assert list(import_offences(file, ast.parse(line))) == []


@pytest.mark.parametrize(
    "line", ["assert size > 0", "import pickle", "from pickle import loads", "x = eval(y)",
             "def f():\n    exec(y)", "print(1)"],
)  # fmt: skip
def test_the_checker_sees_words_that_have_no_place(line: str) -> None:
    assert len(list(word_offences("schedule/new.py", ast.parse(line)))) == 1


def test_pickle_is_there_only_for_callers_who_allow_it() -> None:
    file = MAY_IMPORT_PICKLE
    assert list(word_offences(file, ast.parse("import pickle"))) == []
    for line in ("import marshal", "import shelve", "x = eval(y)"):
        assert len(list(word_offences(file, ast.parse(line)))) == 1
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    public = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
              and node.name in ("encode", "decode")]  # fmt: skip
    assert len(public) == 2
    for function in public:
        named = [option.arg for option in function.args.kwonlyargs]
        defaults = dict(zip(named, function.args.kw_defaults, strict=True))
        asked = defaults["allow_pickle"]
        assert isinstance(asked, ast.Constant)
        assert asked.value is False


def test_what_writes_pickle_reads_none() -> None:
    tree = ast.parse(FILES[WRITES_PICKLE].read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id == "pickle"}  # fmt: skip
    assert used == {"dumps"}


def test_the_native_core_reads_nothing_by_streams() -> None:
    """Beside another libstdc++, which torch for CUDA brings along, they read nothing, or crash."""
    for path in sorted((Path(__file__).parent.parent / "native").iterdir()):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"#include <(fstream|sstream|iostream|regex|locale)>", text), (
            path.name
        )


def test_the_command_line_may_print() -> None:
    assert list(word_offences("cli/new.py", ast.parse("print(1)"))) == []


def families() -> list[Family[object]]:
    packages = [info.name for info in pkgutil.iter_modules([str(PACKAGE)]) if info.ispkg]
    modules = [importlib.import_module(f"roundelay.{name}") for name in packages]
    return [value for module in modules for value in vars(module).values()
            if isinstance(value, Family)]  # fmt: skip


def test_the_families_are_found() -> None:
    assert {"algorithms", "collectives", "networks"} <= {family.label for family in families()}


@pytest.mark.parametrize("family", families(), ids=lambda family: family.label)
def test_every_member_is_one_file_with_one_public_name(family: Family[object]) -> None:
    for name in family.names():
        module = importlib.import_module(f"{family.package}.{name}")
        assert module.__all__ == [family._public(name)]
        assert family.load(name) is getattr(module, family._public(name))


def test_algorithms_are_proved_and_priced_with_the_standard_library_alone() -> None:
    program = """
import sys
from roundelay.algorithms import algorithms
from roundelay.networks import networks
from roundelay.schedule import compile_schedule, from_json, price, prove, to_json

for algorithm in algorithms:
    schedule = from_json(to_json(algorithm.schedule(4)))
    prove(schedule), price(schedule, network=networks.load("switch")(4)), compile_schedule(schedule)
foreign = {"numpy", "torch", "mpi4py", "click", "rich", "msgspec"} & sys.modules.keys()
sys.exit(f"imported {sorted(foreign)}" if foreign else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_has_every_layer_and_what_is_in_it() -> None:
    page = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.split("```text\n", 1)[1].split("```", 1)[0]
    layer, found = -1, {}
    for line in drawn.splitlines():
        layer = int(line[:2]) if line[:2].strip() else layer
        for name in re.findall(r"(\w+)(?:/|\.py)", line[4:31]):
            found[name] = layer
    there = {top(file) for file in FILES} - {"__init__", "__main__"}
    assert found == {name: LAYERS[name] for name in there}
