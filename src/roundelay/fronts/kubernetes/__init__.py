"""Manifests for Kubernetes: a kind of job per file, each a function from a job to its lines."""

from collections.abc import Callable
from typing import Any

from roundelay.fronts.kubernetes._job import KubernetesJob
from roundelay.fronts.kubernetes._yaml import to_yaml
from roundelay.registry import Family

__all__ = ["KubernetesJob", "kubernetes", "to_yaml"]

kubernetes: Family[Callable[[KubernetesJob], dict[str, Any]]] = Family(
    "roundelay.fronts.kubernetes"
)
