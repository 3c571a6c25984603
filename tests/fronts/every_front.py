"""Run every front against the real thing; `make test-fronts`.

Prints a line for each: passed, failed or refused, and why. A front that needs packages has an
environment of its own in build/fronts, which is kept; what it does not bring, torch among it, is
found in the one that runs this. Names as arguments run only those.

    python tests/fronts/every_front.py horovod ray
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "build" / "fronts"
REFUSED = 77  # what a script exits with that can't run here
PYTEST = ("-m", "pytest", "-q", "-rs")


@dataclass(frozen=True)
class Front:
    """What a front needs beside Roundelay and its tests, and what judges it."""

    name: str
    packages: Sequence[str]
    command: Sequence[str]
    alone: bool = False  # with nothing but its packages


FRONTS = (
    Front("jax", (), (*PYTEST, "tests/fronts/jax")),
    Front("horovod", ("tensorflow-cpu", "keras"), (*PYTEST, "tests/fronts/horovod")),
    Front("ray", ("ray[train]",), (*PYTEST, "tests/fronts/ray")),
    Front("kubernetes", ("kubeflow", "pyyaml"), ("tests/fronts/kubernetes/end_to_end.py",),
          alone=True),
    Front("frameworks", (), ("benchmarks/frameworks.py",)),
)  # fmt: skip


def environment(front: Front, log: Path) -> Path:
    """Return the Python of the front's environment, made if it is not there."""
    if not front.packages:
        return Path(sys.executable)
    folder = PLACE / front.name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    with log.open("a") as out:

        def run(*words: str | Path) -> None:
            subprocess.run([*map(str, words)], cwd=ROOT, check=True, stdout=out, stderr=out)

        run(sys.executable, "-m", "venv", "--clear", folder)
        if not front.alone:
            (packages,) = folder.glob("lib/python*/site-packages")
            line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (packages / "others.pth").write_text(line)
        pins = () if front.alone else ("-c", "constraints.txt")
        run(python, "-m", "pip", "install", "--quiet", *pins, *front.packages)
    ready.touch()
    return python


def judged(front: Front) -> tuple[str, str]:
    """Return how a front did, and why."""
    log = PLACE / f"{front.name}.log"
    log.write_text("")
    try:
        python = environment(front, log)
    except subprocess.CalledProcessError as error:
        return "refused", f"{' '.join(error.cmd[1:5])} … ended with {error.returncode}: see {log}"
    path = f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
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
    verdict = {0: "passed", REFUSED: "refused"}.get(done.returncode, "failed")
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
