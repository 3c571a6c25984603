"""What a pod is told of its job by PET_*, the variables that stand for torchrun's options.

Kubeflow's operators set them: Trainer v2 nothing else, PyTorchJob also a RANK, which is the pod's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from roundelay.errors import InvalidArgumentError
from roundelay.launch._variables import whole_variable
from roundelay.launch.local import MOST_RANKS
from roundelay.launch.ranks_here import ranks_here

__all__ = [
    "ranks_of_pod",
    "refuse_alone",
    "refuse_pod_as_rank",
    "torchrun_options",
    "without_others",
]

#: Those of torchrun's options that say which hosts there are and how they meet.
OPTIONS = (
    "nnodes", "node_rank", "master_addr", "master_port",
    "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts",
)  # fmt: skip
NUMBERS = {"node_rank": (0, MOST_RANKS), "master_port": (1, 65535), "max_restarts": (0, 10**9 - 1)}
PER_HOST = "PET_NPROC_PER_NODE"
HOSTS = "PET_NNODES"


def variable(option: str) -> str:
    """Return the variable that stands for an option of torchrun."""
    return f"PET_{option.upper()}"


def torchrun_options(given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's options for this host: those given and, for others, what PET_* say.

    Nothing where all ranks are on this host and nobody asked for what torchrun does.

    >>> torchrun_options({}, {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"})
    {'nnodes': '2', 'node_rank': '1', 'master_addr': 'pod-0'}
    >>> torchrun_options({}, {"PET_NNODES": "1", "PET_NODE_RANK": "0", "RANK": "0"})
    {}
    """
    if "LOCAL_RANK" in environ:  # a rank of a job in these pods starts one of its own
        return dict(given)
    said = {name: environ[variable(name)] for name in OPTIONS if environ.get(variable(name))}
    for name, (least, most) in NUMBERS.items():
        if name in said and name not in given:
            whole_variable(environ, variable(name), least, most)
    several = given["nnodes"] not in ("1", "1:1") if "nnodes" in given else most_hosts(environ) > 1
    if several:
        if "nnodes" not in given:
            _check_place({**said, **given})
        return {**said, **given}
    # Of a job on one host, a place among several says nothing.
    kept = {name: said[name] for name in ("max_restarts",) if int(said.get(name, 0))}
    if not given:
        _refuse_split(environ)
    return {**kept, **given}


def without_others(environ: Mapping[str, str], handed: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for torchrun, which reads PET_* too, without those not handed over."""
    others = {variable(name) for name in OPTIONS if name not in handed}
    return {name: value for name, value in environ.items() if name not in others}


def ranks_of_pod(environ: Mapping[str, str]) -> int:
    """Return how many ranks PET_NPROC_PER_NODE says this host has; without it, one per core."""
    said = "" if "LOCAL_RANK" in environ else environ.get(PER_HOST)
    try:
        return ranks_here(said or "cpu")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{PER_HOST}={error}") from None


def most_hosts(environ: Mapping[str, str]) -> int:
    """Read how many hosts PET_NNODES says there may be; 1 where it is not set."""
    text = environ.get(HOSTS) or "1"
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1] or 1) <= int(found[2]):
        raise InvalidArgumentError(
            f"{HOSTS}={text[:60]!r} is no number of hosts, such as 2 or 1:4. Operators set it: "
            f"correct it, or unset it if there is one host."
        )
    return int(found[2])


def refuse_alone(environ: Mapping[str, str]) -> None:
    """Raise if a process that no launcher started has to be one of several."""
    per_host = environ.get(PER_HOST, "")
    named = [(HOSTS, most_hosts(environ) > 1)]
    named.append((PER_HOST, per_host.isdigit() and int(per_host) > 1))
    for name in (name for name, several in named if several):
        raise InvalidArgumentError(
            f"{name}={environ[name]} says that this job has several ranks, but RANK is not set: "
            f"this process would train alone, as rank 0 of 1, and so would every other. Start it "
            f"with `roundelay run`, which takes its place from PET_*, or with torchrun; or unset "
            f"{name} to run alone."
        )


def refuse_pod_as_rank(environ: Mapping[str, str]) -> None:
    """Raise if RANK is the number of a pod that is to hold several ranks, as in a PyTorchJob."""
    per_host = environ.get(PER_HOST, "")
    if "LOCAL_RANK" not in environ and per_host.isdigit() and int(per_host) > 1:
        raise InvalidArgumentError(
            f"RANK={environ['RANK']} is the number of this pod, for {PER_HOST}={per_host} says "
            f"that it holds {per_host} ranks. Start them with `roundelay run`, which takes its "
            f"place from PET_*, or with torchrun; or unset {PER_HOST} for one rank per pod."
        )


def _check_place(options: Mapping[str, str]) -> None:
    """Raise if hosts lack what they need to meet: torchrun would have each wait for itself."""
    hosts = options["nnodes"]
    numbered = options.get("rdzv_backend", "static") == "static"
    needed = {"node_rank": "which of them this is, from 0", "master_addr": "the host of rank 0"}
    if not numbered:
        needed = {"rdzv_endpoint": "host and port where all of them meet"}
    elif "rdzv_endpoint" in options:
        del needed["master_addr"]
    for name, what in needed.items():
        if name not in options:
            raise InvalidArgumentError(
                f"{HOSTS}={hosts} says that there are several hosts, but {variable(name)} is not "
                f"set. Say {what}, by --{name.replace('_', '-')} or by that variable; or say "
                f"--nnodes 1 for a job of this host alone."
            )
    if numbered and int(options["node_rank"]) >= int(hosts.rpartition(":")[2]):
        raise InvalidArgumentError(
            f"{variable('node_rank')}={options['node_rank']}, but {HOSTS}={hosts}: hosts are "
            f"numbered from 0 to {int(hosts.rpartition(':')[2]) - 1}."
        )


def _refuse_split(environ: Mapping[str, str]) -> None:
    """Raise where a job of this host alone would be one of several that know nothing of another."""
    node = environ.get(variable("node_rank"), "0")
    if node != "0":
        raise InvalidArgumentError(
            f"{variable('node_rank')}={node}, but {HOSTS} does not say how many hosts there are. "
            f"Say it by --nnodes or by that variable; or unset {variable('node_rank')} for a job "
            f"of this host alone."
        )
    if HOSTS in environ:
        return
    size = environ.get("WORLD_SIZE", "")
    if "RANK" in environ and size.isdigit() and int(size) > 1:
        raise InvalidArgumentError(
            f"RANK={environ['RANK']} and WORLD_SIZE={size} are set, as operators do for a pod, "
            f"and each pod would train a job of its own. Say which host this is: --nnodes {size} "
            f"--node-rank {environ['RANK']} --master-addr and --master-port; or unset RANK and "
            f"WORLD_SIZE for a job of this host alone."
        )
