"""An MPIJob of Kubeflow's MPI operator: a launcher with mpirun, and workers with sshd."""

from __future__ import annotations

from typing import Any

from roundelay.fronts.kubernetes._job import (
    KubernetesJob,
    check_pods,
    refuse_elastic,
    refuse_runtime,
)
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

__all__ = ["mpijob"]

NEVER = Because("Never", "what fails once fails again; the first error is the one to read")


def mpijob(job: KubernetesJob) -> dict[str, Any]:
    """Return the manifest: `roundelay run --mpi` starts all ranks, by the operator's hostfile."""
    refuse_elastic(job, "an MPIJob has a fixed number of ranks.")
    refuse_runtime(job, "an MPIJob")
    check_pods(job, lambda index: f"{job.label}-worker-{index}")
    policy = {
        "cleanPodPolicy": Because("Running", "workers do not end by themselves"),
        "backoffLimit": Because(0, "the launcher is not started again"),
    }
    replicas = {"Launcher": _launcher(job), "Worker": _workers(job)}
    spec = {
        "slotsPerWorker": Because(job.per_node, "ranks in each worker, in the hostfile"),
        "mpiImplementation": Because("OpenMPI", "whose mpirun the image has"),
        "launcherCreationPolicy": Because("WaitForWorkersReady", "ssh finds all workers there"),
        "runPolicy": Because(policy, "what is left when the launcher has ended"),
        "mpiReplicaSpecs": Because(replicas, "the pods"),
    }
    pods = f"{job.label}-launcher, {job.label}-worker-0 and so on"
    return {
        **head(job, "kubeflow.org/v2beta1", "MPIJob", why="the MPI operator 0.8", pods=pods),
        "spec": Because(spec, "what is wanted"),
    }


def _launcher(job: KubernetesJob) -> Because:
    words = [
        Because("--mpi", "mpirun starts the ranks, on the hosts of the operator's hostfile"),
        Because("-n", "how many"),
        Because(str(job.ranks), "in all"),
    ]
    if job.env:
        exported = " ".join(f"-x {name}" for name in job.variables)
        why = "Open MPI hands only these to workers"
        words += [Because("--mpi-args", "more words for mpirun"), Because(exported, why)]
    container = {
        "name": Because("launcher", "any name will do"),
        "image": Because(job.image, "with roundelay, mpi4py, Open MPI, ssh and the script in it"),
        **command(job, *words),
        **environment(job),
    }
    pod = {**grace(job), "containers": Because([container], "without GPUs: no rank runs here")}
    return _replicas(1, "there is one launcher", pod)


def _workers(job: KubernetesJob) -> Because:
    container = {
        "name": Because("worker", "any name will do"),
        "image": Because(job.image, "the same"),
        "command": Because(
            [Because("/usr/sbin/sshd", "mpirun comes by ssh")], "instead of its own"
        ),
        "args": Because([Because("-De", "in the foreground, with errors in the log")], "of sshd"),
        **gpus(job, "resources"),
        "volumeMounts": shm_mounts(),
    }
    pod = {
        **grace(job),
        "containers": Because([container], "one per pod"),
        "volumes": shm_volumes(),
    }
    return _replicas(job.nodes, "pods with ranks", pod)


def _replicas(count: int, why: str, pod: dict[str, Any]) -> Because:
    replicas = {
        "replicas": Because(count, why),
        "restartPolicy": NEVER,
        "template": Because({"spec": Because(pod, "the pod's")}, "of a pod"),
    }
    return Because(replicas, "a kind of pod")
