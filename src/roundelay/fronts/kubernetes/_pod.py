"""What all kinds of jobs have in common: words, variables, GPUs, /dev/shm, the grace period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundelay.fronts.kubernetes._job import GPU, KubernetesJob
from roundelay.fronts.kubernetes._yaml import Because

__all__ = ["command", "environment", "gpus", "grace", "head", "shm_mounts", "shm_volumes"]

SHM = "shm"


def head(job: KubernetesJob, api: str, kind: str, *, why: str, pods: str) -> dict[str, Any]:
    """Return the first lines of a manifest."""
    metadata: dict[str, Any] = {"name": Because(job.label, f"pods are called {pods}")}
    if job.namespace:
        metadata["namespace"] = Because(job.namespace, "where the pods run")
    return {
        "apiVersion": Because(api, why),
        "kind": Because(kind, "what the operator looks for"),
        "metadata": Because(metadata, "what the job is called"),
    }


def command(job: KubernetesJob, *words: Because) -> dict[str, Any]:
    """Return the words that a container runs, with `words` behind `roundelay run`."""
    script, *rest = job.target if not job.module else job.target[1:]
    module = [Because("-m", "the next word is a module")] if job.module else []
    run = Because("run", "starts the ranks of this pod as one of several hosts")
    return {
        "command": Because(
            [Because("roundelay", "installed in the image"), run], "instead of the image's own"
        ),
        "args": Because(
            [
                *words,
                *module,
                Because(escaped(script), "the script, as the image has it"),
                *(Because(escaped(word), "handed to the script") for word in rest),
            ],
            "words are not divided at spaces: no shell reads them",
        ),
    }


def escaped(text: str) -> str:
    """Return text out of which Kubernetes makes this text, where it would put in variables.

    >>> escaped("cost: $5"), escaped("$(date)")
    ('cost: $5', '$$(date)')
    """
    return text.replace("$", "$$") if "$$" in text or "$(" in text else text


def environment(job: KubernetesJob) -> dict[str, Any]:
    """Return the variables of a container; nothing if there are none."""
    variables: list[dict[str, Any]] = [
        {"name": Because(name, "as you asked"), "value": Because(escaped(value), "its value")}
        for name, value in job.variables.items()
    ]
    if job.secret:
        key = {
            "name": Because(job.secret, "made by: kubectl create secret generic"),
            "key": Because("secret", "the entry in it"),
        }
        variables.append(
            {
                "name": Because(
                    "ROUNDELAY_SECRET", "by it ranks prove that they belong to the job"
                ),
                "valueFrom": Because(
                    {"secretKeyRef": Because(key, "from a Secret of Kubernetes")},
                    "not in this file, which others may read",
                ),
            }
        )
    return {"env": Because(variables, "variables of the container")} if variables else {}


def gpus(job: KubernetesJob, key: str) -> dict[str, Any]:
    """Return the resources of a pod; nothing without GPUs."""
    if not job.gpu:
        return {}
    limits = {GPU: Because(job.per_node, "one GPU per rank")}
    return {
        key: Because(
            {"limits": Because(limits, "of GPUs, the limit is also the request")},
            "what each pod gets",
        )
    }


def shm_volumes(more: Sequence[Any] = ()) -> Because:
    """Return the volumes of a pod: memory for /dev/shm."""
    memory = {"medium": Because("Memory", "counts as memory of the pod; else it has 64 MiB")}
    shm = {
        "name": Because(SHM, "for NCCL and data loaders with workers; Roundelay itself needs none"),
        "emptyDir": Because(memory, "empty, and gone with the pod"),
    }
    return Because([shm, *more], "what is mounted")


def shm_mounts() -> Because:
    """Return where a container has it."""
    mount = {
        "name": Because(SHM, "the volume"),
        "mountPath": Because("/dev/shm", "where NCCL and data loaders look"),  # noqa: S108
    }
    return Because([mount], "where")


def grace(job: KubernetesJob) -> dict[str, Any]:
    """Return how long a pod has between SIGTERM and SIGKILL."""
    why = "after SIGTERM ranks have time to end in order; then the pod is killed"
    return {"terminationGracePeriodSeconds": Because(job.grace, why)}
