"""A TrainJob of Kubeflow Trainer 2.3, on a runtime that is there already."""

from __future__ import annotations

from typing import Any

from roundelay.fronts.kubernetes._job import KubernetesJob, check_pods, refuse_elastic
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

__all__ = ["trainjob"]

RUNTIME = "torch-distributed"
NODE = "node"  # what Trainer's runtimes call the job and the container of a host
RESTARTS = "there it is said what is done when a pod fails: a TrainJob can't"


def trainjob(job: KubernetesJob) -> dict[str, Any]:
    """Return the manifest: the runtime sets PET_*, from which `roundelay run` knows its place."""
    refuse_elastic(job, "a TrainJob of Trainer 2.3 has a fixed number of nodes.")
    check_pods(job, lambda index: f"{job.label}-{NODE}-0-{index}")
    trainer = {
        "image": Because(job.image, "with roundelay and the script in it"),
        **command(job),
        **environment(job),
        "numNodes": Because(job.nodes, "pods; PET_NNODES in each"),
        "numProcPerNode": Because(job.per_node, "ranks in each pod; PET_NPROC_PER_NODE"),
        **gpus(job, "resourcesPerNode"),
    }
    pod = {
        **grace(job),
        "volumes": shm_volumes(),
        "containers": Because(
            [{"name": Because(NODE, "the runtime's"), "volumeMounts": shm_mounts()}],
            "what is added to them",
        ),
    }
    name = RUNTIME if job.runtime is None else job.runtime
    runtime = {"name": Because(name, f"ships with Trainer and sets PET_*; {RESTARTS}")}
    spec = {
        "runtimeRef": Because(runtime, "the template that this job fills in"),
        "trainer": Because(trainer, "what every pod runs"),
        "runtimePatches": Because([_patch(pod)], "what the template lacks"),
    }
    pods = f"{job.label}-{NODE}-0-0 and so on"
    why = "Kubeflow Trainer 2.3 and later"
    return {
        **head(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", why=why, pods=pods),
        "spec": Because(spec, "what is wanted"),
    }


def _patch(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a change to the pods of a runtime, at its place in the template."""
    template = {"spec": Because(pod, "the pod's")}
    in_job = {"spec": Because({"template": Because(template, "of a pod")}, "the Job's")}
    replicated = {
        "name": Because(NODE, "the job in the template that runs the script"),
        "template": Because(in_job, "of a Job"),
    }
    jobs = Because([replicated], "which jobs are changed")
    in_set = {"spec": Because({"replicatedJobs": jobs}, "the JobSet's")}
    change = {"template": Because(in_set, "of a JobSet, which Trainer makes of it")}
    return {
        "manager": Because("roundelay", "who asks for this change"),
        "trainingRuntimeSpec": Because(change, "as in the runtime"),
    }
