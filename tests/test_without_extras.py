"""Without torch, mpi4py, safetensors or ray: all else works, and what needs one says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import roundelay as rd
from roundelay.errors import InvalidArgumentError, MissingPackageError, RoundelayError

#: Tries every public name, and every way in, where these packages are not to be found.
PROGRAM = """
import json, sys
for name in ("torch", "mpi4py", "safetensors", "ray"):
    sys.modules[name] = None
import roundelay as rd
import numpy as np

WAYS = {f"rd.{name}": (lambda name=name: getattr(rd, name)) for name in rd.__all__}
WAYS |= {f"rd.ray.{name}": (lambda name=name: getattr(rd.ray, name)) for name in rd.ray.__all__}
WAYS["rd.verify("] = lambda: rd.verify(None, None, [])
WAYS["roundelay.training"] = lambda: __import__("roundelay.training.checkpoint.save")
WAYS["roundelay.torch"] = lambda: __import__("roundelay.torch")
WAYS["The engine gloo"] = lambda: rd.run(lambda comm: 1, 2, "gloo")
WAYS["The engine mpi"] = lambda: rd.init("mpi")
WAYS["works"] = lambda: rd.run(lambda comm: comm.all_reduce(np.ones(2)).tolist(), 2, "threads")
found = {}
for way, go in WAYS.items():
    try:
        go()
        found[way] = None
    except Exception as error:
        found[way] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def test_what_needs_a_package_names_itself_and_both_ways_to_install_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    missing = {way: said for way, said in found.items() if said is not None}
    for way, (kind, message) in missing.items():
        extra = "mpi" if "mpi" in way else "ray" if "ray." in way else "torch"
        assert kind == "MissingPackageError", (way, kind, message)
        assert message.startswith(f"{way.removesuffix('(')} needs "), message
        assert f"pip install 'roundelay[{extra}]'" in message
        assert f"pip install -e '.[{extra}]'" in message
    trains = {"prepare", "loader", "Ddp", "Zero", "ledger", "save", "load", "accumulate"}
    assert {f"rd.{name}" for name in trains} <= missing.keys()
    assert {"rd.verify(", "roundelay.training", "roundelay.torch", "The engine gloo",
            "The engine mpi", "rd.ray.run", "rd.ray.RoundelayConfig"} <= missing.keys()  # fmt: skip
    here = {"rd.run", "rd.init", "rd.Op", "rd.Communicator", "rd.verify", "works"}
    assert not here & missing.keys()


def test_one_error_is_both_ours_and_what_import_systems_know() -> None:
    error = MissingPackageError("rd.prepare", "torch")
    assert isinstance(error, RoundelayError)
    assert isinstance(error, InvalidArgumentError)
    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "torch"


def test_the_readme_names_every_extra() -> None:
    root = Path(__file__).parent.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["optional-dependencies"]:
        assert f"'.[{extra}]'" in readme.partition("## Install")[2].partition("\n## ")[0]
    assert rd.__doc__


def test_every_word_says_the_same_of_building_for_jax() -> None:
    root = Path(__file__).parent.parent
    tools = "scikit-build-core nanobind cmake ninja"
    for page in ("README.md", "README.zh.md", "docs/jax.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert (
            f"pip install jax {tools}\npython3 -m pip install --no-build-isolation '.[jax]'" in text
        )
    raised = (root / "src/roundelay/fronts/jax/_primitives.py").read_text(encoding="utf-8")
    assert tools in raised
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    needed = project["build-system"]["requires"] + project["dependency-groups"]["build"]
    assert {re.split("[<>=]", name)[0] for name in needed} == {*tools.split()}
