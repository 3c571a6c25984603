"""A PyTorchJob of Kubeflow's Training Operator 1.9, with a fixed or changing number of pods."""

from __future__ import annotations

from typing import Any

from roundelay.fronts.kubernetes._job import KubernetesJob, check_pods, refuse_runtime
from roundelay.fronts.kubernetes._pod import (
    command,
    environment,
    gpus,
    grace,
    head,
    shm_mounts,
    shm_volumes,
)
from roundelay.fronts.kubernetes._yaml import Because

__all__ = ["pytorchjob"]

MAX_RESTARTS = 3
NEVER = Because("Never", "what fails once fails again; the first error is the one to read")
ON_FAILURE = Because("OnFailure", "a pod that is lost comes back and joins the others")


def pytorchjob(job: KubernetesJob) -> dict[str, Any]:
    """Return the manifest: PET_NODE_RANK tells the pods apart, or the rendezvous if `elastic`."""
    refuse_runtime(job, "a PyTorchJob")
    check_pods(job, lambda index: f"{job.label}-worker-{index}")
    spec: dict[str, Any] = {
        "nprocPerNode": Because(str(job.per_node), "ranks in each pod; PET_NPROC_PER_NODE")
    }
    if job.elastic:
        policy = {
            "rdzvBackend": Because("c10d", "pods come and go, so they are numbered as they meet"),
            "minReplicas": Because(1, "with fewer pods than this it waits"),
            "maxReplicas": Because(job.nodes, "with more it never runs"),
            "maxRestarts": Because(MAX_RESTARTS, "of all ranks, when one is lost or pods join"),
        }
        spec["elasticPolicy"] = Because(policy, "ranks start anew when the number of pods changes")
        workers = {"Worker": _replicas(job, job.nodes, ON_FAILURE)}
    else:
        workers = {"Master": _replicas(job, 1, NEVER)}
        if job.nodes > 1:
            workers["Worker"] = _replicas(job, job.nodes - 1, NEVER)
    spec["pytorchReplicaSpecs"] = Because(workers, "the pods")
    first = f"{job.label}-{'worker' if job.elastic else 'master'}-0 and so on"
    why = "Kubeflow Training Operator 1.9"
    return {
        **head(job, "kubeflow.org/v1", "PyTorchJob", why=why, pods=first),
        "spec": Because(spec, "what is wanted"),
    }


def _replicas(job: KubernetesJob, count: int, restart: Because) -> Because:
    container = {
        "name": Because("pytorch", "the name that the operator looks for"),
        "image": Because(job.image, "with roundelay and the script in it"),
        **command(job),
        **environment(job),
        **gpus(job, "resources"),
        "volumeMounts": shm_mounts(),
    }
    pod = {
        **grace(job),
        "containers": Because([container], "one per pod"),
        "volumes": shm_volumes(),
    }
    replicas = {
        "replicas": Because(count, "pods of this kind"),
        "restartPolicy": restart,
        "template": Because({"spec": Because(pod, "the pod's")}, "of a pod"),
    }
    return Because(replicas, "all run the same script")
