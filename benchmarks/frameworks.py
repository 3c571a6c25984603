"""What trains on gloo trains on Roundelay, by the line that changes, and to the same bits.

Every framework is installed into an environment of its own, under build/frameworks, over one torch
that they share, as constraints.txt pins it. Its program, a file in _frameworks/, trains a small
model on two ranks, once on gloo and once on Roundelay; losses are compared to the last bit. Nothing
in a program names Roundelay, or imports it, beyond the line that the table shows. Writes
results/frameworks.json.

    python benchmarks/frameworks.py                      # all of them
    python benchmarks/frameworks.py "Lightning Trainer"  # one; the results keep the others
    python benchmarks/frameworks.py --here               # those for torch alone, in this Python
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _environments import python_of, run, wheel_of

PROGRAMS = Path(__file__).parent / "_frameworks"
RESULTS = Path(__file__).parent / "results" / "frameworks.json"
BACKENDS = ("gloo", "roundelay")
LINE = "losses "
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
    source: str = ""  # repository@commit of what is not on PyPI


WORD = 'init_process_group("roundelay")'
ZERO = 'deepspeed.init_distributed("roundelay")'
LIGHTNING = 'DDPStrategy(process_group_backend="roundelay")'
FIRST = f"{WORD} before it"
PICOTRON = "https://github.com/huggingface/picotron@59714b1bf25541dbeb6f5a721ed15f6d0768e786"
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
    *(
        Framework(
            f"torchtitan, {name}", "torchtitan_program.py", FIRST, "torchtitan", (axis,),
            needs=("torchtitan==0.2.2", "triton"),  # 0.3 takes no TrainSpec
        )
        for name, axis in (
            ("FSDP", "data_parallel_shard"),
            ("tensor parallel", "tensor_parallel"),
            ("pipeline parallel", "pipeline_parallel"),
        )
    ),
    *(
        Framework(
            f"picotron, {axis}", "picotron_program.py", WORD, "picotron", (axis,),
            needs=("huggingface_hub",), source=PICOTRON,
        )
        for axis in ("dp", "tp", "pp", "cp")
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
    found: dict[str, list[str]] = {}
    try:
        if framework.package == HERE or wheel is None:
            python = Path(sys.executable)
        else:
            python = python_of(framework.package, framework.needs, framework.source, wheel)
        asked = f"import importlib.metadata as m; print(m.version({framework.package!r}))"
        commit = framework.source.rpartition("@")[2][:7]
        made["version"] = commit or run([python, "-c", asked]).strip()
        for backend in BACKENDS:
            found[backend] = losses(framework, python, backend)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        on = f"on {BACKENDS[len(found)]}: " if "version" in made else ""
        return {**made, "outcome": "failed", "why": f"{on}{error}"}
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
    wheel = wheel_of() if any(one.package != HERE for one in chosen) else None
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = {one["framework"]: one for one in known.get("rows", ())}
    for framework in chosen:
        made = rows[framework.name] = row(framework, wheel)
        told = [made["outcome"], framework.name, made.get("version", ""), made["why"]]
        print(*told, sep="  ", flush=True)
        if not given.here:
            known = keep(known, rows, anew=not given.names)
    failed = [one.name for one in chosen if rows[one.name]["outcome"] == "failed"]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed", *failed, sep="; not: ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
