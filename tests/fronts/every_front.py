"""Run every front against the real thing, each in an environment of its own; `make test-fronts`.

Prints a line for each: passed, failed or skipped, and why. Environments lie in build/fronts and are
kept; names as arguments run only those.

    python tests/fronts/every_front.py horovod ray
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "build" / "fronts"
SKIPPED = 77  # what a script exits with that can't run here
GROUPS = ("--group", "build", "--group", "test")


@dataclass(frozen=True)
class Front:
    """What a front needs beside Roundelay and its tests, and what judges it."""

    name: str
    packages: Sequence[str]
    command: Sequence[str]
    editable: bool = True  # or Roundelay is not in its environment


FRONTS = (
    Front("jax", (), ("-m", "pytest", "-q", "tests/fronts/jax")),
    Front("horovod", ("tensorflow-cpu", "keras"), ("-m", "pytest", "-q", "tests/fronts/horovod")),
    Front("ray", ("ray[train]",), ("-m", "pytest", "-q", "tests/fronts/ray")),
    Front("kubernetes", ("kubeflow", "pyyaml"), ("tests/fronts/kubernetes/end_to_end.py",),
          editable=False),
    Front("frameworks", (), ("benchmarks/frameworks.py",)),
)  # fmt: skip


def environment(front: Front, log: Path) -> Path:
    """Return the Python of the front's environment, made if it is not there."""
    folder = PLACE / front.name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    pins = ["-c", "constraints.txt"] if front.editable else []
    steps: list[list[str]] = [[sys.executable, "-m", "venv", str(folder)]]
    if front.editable:
        steps += [[*pip, "--upgrade", "pip>=25.1"], [*pip, *pins, "torch"]]
        steps += [[*pip, *pins, *GROUPS, *front.packages]]
        steps += [[*pip, *pins, "--no-build-isolation", "-e", "."]]
    else:
        steps += [[*pip, *front.packages]]
    with log.open("a") as out:
        for step in steps:
            subprocess.run(step, cwd=ROOT, check=True, stdout=out, stderr=out)
    ready.touch()
    return python


def judged(front: Front) -> tuple[str, str]:
    """Return how a front did, and why."""
    log = PLACE / f"{front.name}.log"
    log.write_text("")
    try:
        python = environment(front, log)
    except subprocess.CalledProcessError as error:
        return "skipped", f"{' '.join(error.cmd[1:5])} … ended with {error.returncode}: see {log}"
    path = f"{python.parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "ROUNDELAY_PYTHON": sys.executable}
    with log.open("a") as out:
        done = subprocess.run(
            [str(python), *front.command],
            cwd=ROOT,
            check=False,
            stdout=out,
            stderr=out,
            env=environ,
        )
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1].strip("= ") if said else ""
    verdict = {0: "passed", SKIPPED: "skipped"}.get(done.returncode, "failed")
    return verdict, last if verdict != "failed" else f"{last}: see {log}"


def main() -> None:
    """Judge the fronts that were named, or all."""
    PLACE.mkdir(parents=True, exist_ok=True)
    named = sys.argv[1:] or [front.name for front in FRONTS]
    unknown = {*named} - {front.name for front in FRONTS}
    if unknown:
        sys.exit(f"No front is called {', '.join(sorted(unknown))}: {[one.name for one in FRONTS]}")
    failed = False
    for front in FRONTS:
        if front.name in named:
            verdict, why = judged(front)
            failed = failed or verdict == "failed"
            print(f"{front.name:12} {verdict:8} {why}", flush=True)  # noqa: T201 - what it is for
    sys.exit(failed)


if __name__ == "__main__":
    main()
