"""What trains on gloo trains on Roundelay, by the line that changes, and to the same bits.

Every framework is installed into an environment of its own, under build/frameworks, with torch
as constraints.txt pins it. Its program, a file in _frameworks/, trains a small model on two ranks,
once on gloo and once on Roundelay; losses are compared to the last bit. Nothing in a program
names Roundelay, or imports it, beyond the line that the table shows. Writes
results/frameworks.json.

    python benchmarks/frameworks.py                      # all of them
    python benchmarks/frameworks.py "Lightning Trainer"  # one; the results keep the others
    python benchmarks/frameworks.py --here               # those for torch alone, in this Python
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "_frameworks"
RESULTS = Path(__file__).parent / "results" / "frameworks.json"
ENVIRONMENTS = ROOT / "build" / "frameworks"
BACKENDS = ("gloo", "roundelay")
LINE = "losses "
LIMIT_S = 600.0
RANKS = 2
IMPORTS = 5  # of torch
#: Of the frameworks below, what is needed for torch alone is here already.
HERE = "torch"


@dataclass(frozen=True)
class Framework:
    """One row: what is installed, what is run, and the line that changes."""

    name: str
    program: str
    line: str
    package: str = HERE  # on PyPI, and with it what else it needs
    arguments: tuple[str, ...] = ()
    torchrun: bool = True  # else the program starts its own ranks
    needs: tuple[str, ...] = ()
    restarts: int = 0


WORD = 'init_process_group("roundelay")'
ZERO = 'deepspeed.init_distributed("roundelay")'
LIGHTNING = 'DDPStrategy(process_group_backend="roundelay")'
FIRST = f"{WORD} before it"
FRAMEWORKS = [
    Framework("DistributedDataParallel", "ddp.py", WORD),
    Framework("FSDP2", "fsdp2.py", WORD),
    Framework("DTensor, tensor parallel", "dtensor.py", WORD),
    Framework("distributed checkpoints, asynchronous", "checkpoints.py", WORD),
    Framework("torchrun, restart after a failure", "elastic.py", WORD, restarts=1),
    Framework("Lightning Fabric", "fabric.py", LIGHTNING, "lightning"),
    Framework("Lightning Trainer", "lightning_trainer.py", LIGHTNING, "lightning"),
    Framework("Accelerate", "accelerate_program.py", FIRST, "accelerate"),
    Framework(
        "Transformers Trainer", "hf_trainer.py", FIRST, "transformers", needs=("accelerate",)
    ),
    *(
        Framework(
            f"DeepSpeed, ZeRO {stage}", "deepspeed_program.py", ZERO, "deepspeed", (stage,),
            needs=("setuptools",),
        )
        for stage in "123"
    ),
    Framework(
        "Ray TorchTrainer", "ray_train.py", 'TorchConfig(backend="roundelay")', "ray",
        torchrun=False, needs=("ray[train]",),
    ),
    Framework(
        "torchft, a replica dies", "torchft_program.py", "Manager(pg=process_group())",
        "torchft-nightly", torchrun=False,
    ),
]  # fmt: skip


def run(command: Sequence[str | Path], **options: object) -> str:
    """Return what a command prints; raise with its last lines if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(  # noqa: S603 - our own commands
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=environ,
        **options,  # type: ignore[call-overload] # cwd
    )
    if done.returncode:
        last = [one for one in f"{done.stdout}\n{done.stderr}".splitlines() if one.strip()]
        raise RuntimeError(f"exit {done.returncode}: {' | '.join(last[-3:])}")
    return str(done.stdout)


def pinned(package: str) -> str:
    """Return a requirement as constraints.txt pins it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


@functools.cache
def python_of(package: str, needs: tuple[str, ...], wheel: Path | None) -> Path:
    """Return the Python of a package's environment, which is made if it is not there."""
    if package == HERE or wheel is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / re.sub(r"\W+", "_", package)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        run([*pip, pinned("torch"), pinned("numpy")])  # first, so that nobody brings another
        run([*pip, pinned("torch"), package, *needs])
        (folder / ".ready").touch()
    run([*pip, wheel])
    run([*pip, "--force-reinstall", "--no-deps", wheel])  # of the tree as it is
    return python


def losses(framework: Framework, python: Path, backend: str) -> list[str]:
    """Return the losses of one run, as they were printed."""
    launcher = [
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        f"--max-restarts={framework.restarts}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        said = run(
            [
                python,
                *(launcher if framework.torchrun else []),
                PROGRAMS / framework.program,
                backend,
                folder,
                *framework.arguments,
            ],
            cwd=folder,
        )
    found = [line.removeprefix(LINE) for line in said.splitlines() if line.startswith(LINE)]
    if len(found) != 1 or not found[0]:
        raise RuntimeError(f"printed {len(found)} lines of losses")
    return found[0].split()


def row(framework: Framework, wheel: Path | None) -> dict[str, object]:
    """Return what became of one framework."""
    made: dict[str, object] = {
        "framework": framework.name, "package": framework.package, "line": framework.line,
        "program": framework.program,
    }  # fmt: skip
    try:
        python = python_of(framework.package, framework.needs, wheel)
        asked = f"import importlib.metadata as m; print(m.version({framework.package!r}))"
        made["version"] = run([python, "-c", asked]).strip()
        found = {backend: losses(framework, python, backend) for backend in BACKENDS}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {**made, "outcome": "failed", "why": str(error)}
    same = found["gloo"] == found["roundelay"]
    made["losses"] = len(found["gloo"])
    return {**made, "outcome": "passed" if same else "failed", "why": "" if same else str(found)}


def import_cost() -> dict[str, float]:
    """Return CPU time of `import torch`, and of our name in it, in ms, the least of some."""
    whole = "import time, torch; print(time.process_time())"
    name = (
        "import sys, time, torch; [sys.modules.pop(n) for n in [*sys.modules] if 'roundelay' in n];"
        "torch.distributed.Backend._plugins.pop('ROUNDELAY', None); began = time.process_time();"
        "from roundelay.torch_autoload import name_backend; name_backend();"
        "print(time.process_time() - began)"
    )
    took = {
        word: 1000 * min(float(run([sys.executable, "-c", code])) for _ in range(IMPORTS))
        for word, code in (("torch_ms", whole), ("name_ms", name))
    }
    return {word: round(one, 3) for word, one in took.items()}


def keep(known: dict[str, Any], rows: dict[str, Any], *, anew: bool) -> dict[str, Any]:
    """Write the results, so that what went before stays if a later one takes everything down."""
    cost = known.get("import_cost")
    found = {
        "command": "python benchmarks/frameworks.py",
        "python": platform.python_version(), "cores": os.cpu_count(), "ranks": RANKS,
        "torch": importlib.metadata.version("torch"),
        "import_cost": import_cost() if cost is None or (anew and "anew" not in known) else cost,
        "rows": [rows[one.name] for one in FRAMEWORKS if one.name in rows],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return {**found, "anew": True}


def main() -> int:
    """Run what was asked for, print how each ended, and keep the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of frameworks; all if there are none")
    parser.add_argument("--here", action="store_true", help="those for torch alone; keep nothing")
    given = parser.parse_args()
    chosen = [
        one
        for one in FRAMEWORKS
        if (not given.names or one.name in given.names) and not (given.here and one.package != HERE)
    ]
    if not chosen:
        parser.error(f"known: {', '.join(one.name for one in FRAMEWORKS)}")
    wheel = None
    if any(one.package != HERE for one in chosen):
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        run([
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            "--wheel-dir", ENVIRONMENTS, ROOT,
        ])  # fmt: skip
        wheel = max(ENVIRONMENTS.glob("roundelay-*.whl"), key=lambda path: path.stat().st_mtime)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = {one["framework"]: one for one in known.get("rows", ())}
    for framework in chosen:
        made = rows[framework.name] = row(framework, wheel)
        told = [made["outcome"], framework.name, made.get("version", ""), made["why"]]
        print(*told, sep="  ", flush=True)
        if not given.here:
            known = keep(known, rows, anew=not given.names)
    return int(any(rows[one.name]["outcome"] == "failed" for one in chosen))


if __name__ == "__main__":
    sys.exit(main())
