"""In a pod the job is the one that PET_* tell of, or it is refused; never one of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library

import pytest

from roundelay import _core
from roundelay.errors import InvalidArgumentError
from roundelay.launch import ranks_here as counting
from roundelay.launch.environment import found_place
from roundelay.launch.pods import (
    OPTIONS,
    most_hosts,
    ranks_of_pod,
    torchrun_options,
    variable,
    without_others,
)
from roundelay.launch.ranks_here import gpu_count, ranks_here

Environ = dict[str, str]


def present(**values: str | None) -> Environ:
    return {name: value for name, value in values.items() if value is not None}


def pods() -> Iterator[tuple[Environ, Environ]]:
    """Yield what the command line and the variables may say, good and bad."""
    words = (None, "1", "2", "1:2")
    grid = itertools.product(
        words, (None, "1"), (None, "", "1", "1:1", "2", "1:3"), (None, "0", "1", "3"),
        (None, "pod-0"), (None, "c10d"), (None, "0", "3"),
    )  # fmt: skip
    for nnodes, node, pet_nnodes, pet_node, addr, backend, restarts in grid:
        yield present(nnodes=nnodes, node_rank=node), present(
            PET_NNODES=pet_nnodes, PET_NODE_RANK=pet_node, PET_MASTER_ADDR=addr,
            PET_RDZV_BACKEND=backend, PET_MAX_RESTARTS=restarts,
        )  # fmt: skip


def test_no_pod_of_several_trains_a_job_of_its_own() -> None:
    seen = {"here": 0, "handed over": 0, "refused": 0}
    for given, environ in pods():
        several = most_hosts(environ) > 1
        try:
            handed = torchrun_options(given, environ)
        except InvalidArgumentError as error:
            seen["refused"] += 1
            assert "PET_" in str(error)
            assert "nnodes" not in given
            continue
        # The command line beats the variables, one by one.
        assert handed.items() >= given.items()
        if handed:
            seen["handed over"] += 1
            told = {name: environ.get(variable(name)) for name in handed.keys() - given.keys()}
            assert {name: handed[name] for name in told} == told
            if "nnodes" not in given and several:
                assert handed["nnodes"] == environ["PET_NNODES"]
                static = "rdzv_backend" not in handed
                needed = {"node_rank", "master_addr"} if static else {"rdzv_endpoint"}
                assert handed.keys() >= needed
        else:
            seen["here"] += 1
            assert not several
            assert environ.get("PET_NODE_RANK", "0") == "0"
            assert environ.get("PET_MAX_RESTARTS", "0") == "0"
        # Torchrun reads the variables too: it must not find there what was overruled.
        left = without_others(environ, handed)
        assert {name for name in OPTIONS if variable(name) in left} <= handed.keys()
    assert all(count > 50 for count in seen.values()), seen


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES='two' is no number of hosts"),
        ({"PET_NNODES": "0"}, "PET_NNODES='0'"),
        ({"PET_NNODES": "3:2"}, "PET_NNODES='3:2'"),
        ({"PET_NNODES": "-1"}, "PET_NNODES='-1'"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is not set. Say which of them this is"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "by --master-addr or by that variable"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"}, "from 0 to 1"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "x"}, "PET_NODE_RANK='x'"),
        ({"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"}, "PET_RDZV_ENDPOINT is not set. Say host"),
        ({"PET_NODE_RANK": "1"}, "PET_NNODES does not say how many"),
        ({"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT='70000'"),
        ({"PET_MAX_RESTARTS": "-1"}, "PET_MAX_RESTARTS='-1'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "--nnodes 2 --node-rank 1"),
    ],
)
def test_what_is_missing_or_wrong_is_named_with_the_way_out(environ: Environ, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        torchrun_options({}, environ)
    assert said in str(caught.value)


@pytest.mark.parametrize("pod", [{}, {"PET_NNODES": "2", "PET_NODE_RANK": "1"}])
def test_a_rank_may_start_a_job_of_its_own(pod: Environ) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "PET_NPROC_PER_NODE": "7", **pod}
    assert torchrun_options({}, rank) == {}
    assert torchrun_options({"nnodes": "1"}, rank) == {"nnodes": "1"}
    assert without_others(rank, {"nnodes": "1"}).keys().isdisjoint({"PET_NODE_RANK"})
    assert ranks_of_pod(rank) == _core.available_cores()


BY_A_LAUNCHER = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
AS_A_POD = {"RANK": "1", "WORLD_SIZE": "4"}  # as a PyTorchJob says it: the number of the pod
MEETS = {"MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
OF_MPI = {"PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.parametrize("hosts", [None, "", "1", "1:1", "2", "1:4"])
@pytest.mark.parametrize("per_host", [None, "", "auto", "gpu", "1", "4"])
@pytest.mark.parametrize("place", [{}, BY_A_LAUNCHER, AS_A_POD, OF_MPI])
def test_init_is_alone_only_where_nobody_says_otherwise(
    hosts: str | None, per_host: str | None, place: Environ
) -> None:
    environ = {**present(PET_NNODES=hosts, PET_NPROC_PER_NODE=per_host), **place, **MEETS}
    more_here = per_host == "4"
    refused = {
        id(BY_A_LAUNCHER): False, id(OF_MPI): False,
        id(AS_A_POD): more_here,
    }.get(id(place), more_here or hosts in ("2", "1:4"))  # fmt: skip
    if not refused:
        job = found_place(environ)
        assert (job.rank, job.job.size) == ((1, 4) if "RANK" in place else (0, 1))
        return
    with pytest.raises(InvalidArgumentError, match=r"`roundelay run`.*or unset PET_N") as caught:
        found_place(environ)
    assert ("number of this pod" in str(caught.value)) == ("RANK" in place)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_the_words_for_ranks_mean_what_they_mean_to_torchrun(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "gpu_count", lambda: gpus)
    cores = _core.available_cores()
    due = {"auto": gpus or cores, "cpu": cores, "gpu": gpus, "3": 3}
    for word, count in due.items():
        if count:
            assert ranks_here(word) == ranks_of_pod({"PET_NPROC_PER_NODE": word}) == count
        else:
            with pytest.raises(InvalidArgumentError, match=r"PET_NPROC_PER_NODE='gpu'.*CUDA_VISI"):
                ranks_of_pod({"PET_NPROC_PER_NODE": word})
    assert ranks_of_pod({}) == ranks_of_pod({"PET_NPROC_PER_NODE": ""}) == cores


@pytest.mark.parametrize("word", ["x", "0", "-1", "1.5", "٣", "9" * 30, "2000"])
def test_what_is_no_number_of_ranks_is_named(word: str) -> None:
    with pytest.raises(InvalidArgumentError, match="PET_NPROC_PER_NODE='"):
        ranks_of_pod({"PET_NPROC_PER_NODE": word})


def test_gpus_are_counted_as_torch_counts_them() -> None:
    if find_library("cuda") is None:
        assert gpu_count() == 0
        pytest.skip("no driver of NVIDIA's")
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    for hidden in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        said = subprocess.run(
            asked, env={**os.environ, **hidden}, capture_output=True, text=True, check=True
        ).stdout
        count = "from roundelay.launch.ranks_here import gpu_count; print(gpu_count())"
        ours = subprocess.run(
            [sys.executable, "-c", count],
            env={**os.environ, **hidden},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert ours == said
