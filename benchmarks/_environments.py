"""Environments for frameworks: each its own packages, over one torch that all of them share."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / "build" / "frameworks"
LIMIT_S = 600.0
SHARED = ("torch", "numpy")


def run(command: Sequence[str | Path], **options: object) -> str:
    """Return what a command prints; raise with its last lines if it fails."""
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TORCH_EXTENSIONS_DIR": str(ENVIRONMENTS / "extensions"),  # what DeepSpeed compiles
    }  # fmt: skip
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


def packages_of(folder: Path) -> Path:
    """Return where an environment keeps its packages."""
    return next(folder.glob("lib/python*/site-packages"))


def made(folder: Path) -> list[str | Path]:
    """Make an environment anew, and return the command that installs into it."""
    venv.create(folder, with_pip=True, clear=True)
    return [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]


@functools.cache
def shared() -> Path:
    """Return the packages that every environment has, installed if they are not there."""
    folder = ENVIRONMENTS / "shared"
    if not (folder / ".ready").exists():
        run([*made(folder), *map(pinned, SHARED)])
        (folder / ".ready").touch()
    return packages_of(folder)


def wheel_of() -> Path:
    """Return a wheel of the tree as it is."""
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    run([
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", ENVIRONMENTS, ROOT,
    ])  # fmt: skip
    return max(ENVIRONMENTS.glob("roundelay-*.whl"), key=lambda path: path.stat().st_mtime)


@functools.cache
def python_of(package: str, needs: tuple[str, ...], source: str, wheel: Path) -> Path:
    """Return the Python of a package's environment, which is made if it is not there.

    A package with a source is a folder of a repository at a commit; the others are on PyPI.
    """
    folder = ENVIRONMENTS / re.sub(r"\W+", "_", package)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    if not (folder / ".ready").exists():
        pip = made(folder)
        paths = [shared()]
        if source:
            repository, _, commit = source.rpartition("@")
            paths.append(folder / "source")
            run(["git", "clone", "--quiet", repository, paths[-1]])
            run(["git", "-C", paths[-1], "checkout", "--quiet", commit])
        (packages_of(folder) / "shared.pth").write_text("\n".join(map(str, paths)) + "\n")
        run([*pip, *map(pinned, SHARED), *([] if source else [package]), *needs])
        (folder / ".ready").touch()
    run([*pip, wheel])
    run([*pip, "--force-reinstall", "--no-deps", wheel])  # of the tree as it is
    return python
