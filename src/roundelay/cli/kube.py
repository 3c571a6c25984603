"""`roundelay kube`: the manifest of a job for Kubernetes, explained, written or applied."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import click

from roundelay.cli._write import check_place, write_text
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.kubernetes import KubernetesJob, kubernetes, to_yaml

__all__ = ["command"]

SAYS = {
    "trainjob": "A TrainJob, for Kubeflow Trainer 2.3 and later.",
    "pytorchjob": "A PyTorchJob, for Kubeflow's Training Operator 1.9.",
    "mpijob": "An MPIJob, for Kubeflow's MPI operator.",
}
EXAMPLES = """\b
Examples:
  roundelay kube trainjob --nodes 2 --ranks 8 --image me/train:1 train.py --epochs 3
  roundelay kube pytorchjob --elastic --explain --nodes 4 --ranks 16 --image me/train:1 train.py
  roundelay kube mpijob --nodes 2 --ranks 8 --image me/train:1 train.py | kubectl apply -f -
"""
OPTIONS = (
    click.option("--nodes", type=int, required=True, help="How many pods."),
    click.option("--ranks", type=int, required=True, help="How many ranks, in all pods together."),
    click.option("--image", required=True, help="The image, with Roundelay and the script in it."),
    click.option("--name", help="What the job is called.  [default: as the script]"),
    click.option("--namespace", metavar="NAME", help="Where its pods run."),
    click.option("--gpu", is_flag=True, help="A GPU for every rank."),
    click.option("--elastic", is_flag=True, help="Go on with fewer pods. PyTorchJob only."),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable; repeatable."),
    click.option("--secret", metavar="NAME", help="A Secret with the key 'secret'."),
    click.option(
        "--runtime",
        metavar="NAME",
        help="The ClusterTrainingRuntime of a TrainJob.  [default: torch-distributed]",
    ),
    click.option(
        "--grace",
        type=int,
        default=60,
        show_default=True,
        metavar="SECONDS",
        help="From SIGTERM until a pod is killed.",
    ),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module: -m pkg.train"),
    click.option("--explain", is_flag=True, help="Say the reason of each line, behind it."),
    click.option("--out", type=click.Path(path_type=Path), help="Write a file instead."),
    click.option("--apply", is_flag=True, help="Hand it to kubectl instead."),
    click.argument("script"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
)


@click.group("kube", epilog=EXAMPLES)
def command() -> None:
    """Print the manifest of a job for Kubernetes, for one of Kubeflow's operators.

    In its pods `roundelay run` takes hosts and ranks from what the operator says, and SCRIPT runs
    as on one host.
    """


def _kind(name: str) -> click.Command:
    """Return the command that makes jobs of one kind."""

    def make(*, explain: bool, out: Path | None, apply: bool, **said: Any) -> None:
        if out is not None:
            check_place(out, example="job.yaml")
        kubectl = _find_kubectl() if apply else ""
        text = to_yaml(kubernetes.load(name)(KubernetesJob(**said)), explained=explain)
        if out is not None:
            write_text(out, text, f"apply it with: kubectl apply -f {out}")
        if apply:
            done = subprocess.run(  # noqa: S603 - the user's own
                [kubectl, "apply", "-f", "-"], input=text, text=True, check=False
            )
            raise click.exceptions.Exit(done.returncode)
        if out is None:
            click.echo(text, nl=False)

    made = click.command(
        name, help=SAYS.get(name), context_settings={"allow_interspersed_args": False}
    )(make)
    for option in OPTIONS:
        made = option(made)
    return made


def _find_kubectl() -> str:
    path = shutil.which("kubectl")
    if path is None:
        raise InvalidArgumentError(
            "--apply needs kubectl, which is not on the PATH. Install it "
            "(https://kubernetes.io/docs/tasks/tools), or write the manifest by --out job.yaml and "
            "apply it where kubectl is."
        )
    return path


for _name in kubernetes.names():
    command.add_command(_kind(_name))
