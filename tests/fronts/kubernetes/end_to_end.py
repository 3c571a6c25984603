"""Kubeflow's SDK runs a function of ours as a TrainJob on this machine, until it is Complete.

    python tests/fronts/kubernetes/end_to_end.py

Run it in an environment of its own with `pip install kubeflow`; Roundelay need not be there. The
SDK makes another one for the job and installs torch and Roundelay into it, from a wheel that is
built first. Exits with 0 if all holds, with 77 where something is missing that it needs.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent.parent
RANKS = 2
REFUSED = 77


def train() -> None:
    """Be a rank: what the SDK takes is the text of this function, so all it needs is in it."""
    import numpy as np  # noqa: PLC0415

    import roundelay as rd  # noqa: PLC0415

    comm = rd.init()
    total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
    print(f"rank {comm.rank} of {comm.size}: {total[-1]:g}", flush=True)  # noqa: T201


def fail() -> None:
    """Be a job whose second rank fails, of which the first must hear."""
    import roundelay as rd  # noqa: PLC0415

    comm = rd.init()
    if comm.rank == 1:
        raise ValueError("no data")
    comm.barrier()


def wheel(folder: str) -> str:
    """Build a wheel of this repository, and return where it is."""
    built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, str(ROOT)]
    subprocess.run(built, check=True)
    (path,) = Path(folder).glob("roundelay-*.whl")
    return f"roundelay @ file://{path}"


def indexes() -> list[str]:
    """Return where pip gets packages from: the SDK names an index of its own otherwise."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return [os.environ.get("PIP_INDEX_URL") or said or "https://pypi.org/simple"]


def status_of(client: Any, trainer: Any) -> tuple[str, str]:
    """Run a job to its end; return its status, and what it printed."""
    name = client.train(runtime="torch-distributed", trainer=trainer)
    ended = client.wait_for_job_status(name, {"Complete", "Failed"}, timeout=900)
    return ended.status, "\n".join(client.get_job_logs(name))


def manifest_is_read_by_the_sdk(python: str) -> None:
    """See that the SDK's own models take a manifest, and give it back as it was."""
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415

    words = ["kube", "trainjob", "--nodes", "2", "--ranks", "8", "--image", "a:1", "--gpu",
             "--env", "A=no", "--secret", "s", "train.py", "--lr", "-1"]  # fmt: skip
    made = subprocess.run([python, "-m", "roundelay", *words], capture_output=True, check=True)
    manifest = yaml.safe_load(made.stdout)
    models = importlib.import_module("kubeflow_trainer_api.models")
    read = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    expect(read.to_dict() == manifest, f"the SDK's models read {read.to_dict()}")


def expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    if not holds:
        sys.exit(otherwise)


def main() -> None:
    try:
        sdk = importlib.import_module("kubeflow.trainer")
    except ImportError:
        sys.stderr.write("needs Kubeflow's SDK: pip install kubeflow\n")
        sys.exit(REFUSED)
    client = sdk.TrainerClient(backend_config=sdk.LocalProcessBackendConfig())
    with tempfile.TemporaryDirectory() as folder:
        packages = [
            os.environ.get("ROUNDELAY_WHEEL") or wheel(folder),
            f"torch=={os.environ.get('TORCH', '2.13.0')}",
            "numpy",
        ]
        expected = "".join(f"rank {rank} of {RANKS}: 3\n" for rank in range(RANKS))
        for function, due, said in (
            (train, "Complete", expected.splitlines()),
            (fail, "Failed", ["ValueError: no data"]),
        ):
            trainer = sdk.CustomTrainer(
                func=function,
                packages_to_install=packages,
                pip_index_urls=indexes(),
                env={**os.environ, "PET_NPROC_PER_NODE": str(RANKS)},  # it gets no other
            )
            status, logs = status_of(client, trainer)
            expect(status == due, f"{function.__name__} is {status}, not {due}:\n{logs}")
            for line in said:
                expect(line in logs, f"{function.__name__} did not say {line!r}:\n{logs}")
            sys.stdout.write(f"{function.__name__}: {status}, as it should be\n")
    manifest_is_read_by_the_sdk(os.environ.get("ROUNDELAY_PYTHON", sys.executable))
    sys.stdout.write("the manifest of a TrainJob: read by the SDK's models as it is\n")


if __name__ == "__main__":
    main()
