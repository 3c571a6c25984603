"""Groups for torchft: made anew in the same processes after a replica has died.

torchft itself is not needed here: its wrapper asks for no more than what stands in for it below.
`benchmarks/frameworks.py` runs the real one.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore

from roundelay.errors import MissingPackageError, PeerLost
from roundelay.torch.torchft import process_group


class Wrapper(dist.ProcessGroup):
    """What torchft's ProcessGroupWrapper does between two groups."""

    _create_pg: Any

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # one of two
        self._pg: Any = None
        self._timeout = timeout

    def configure(self, store: Any, rank: int, size: int) -> None:
        self.abort(errored=False)
        self._pg = self._create_pg(store, rank, size)

    def abort(self, errored: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - as it has it
        if self._pg is not None:
            self._pg.abort()
            self._pg = None


def made() -> Any:
    module: Any = ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = Wrapper
    sys.modules["torchft"] = ModuleType("torchft")
    sys.modules["torchft.process_group"] = module
    return process_group()


def total(group: Any, numbers: int) -> float:
    x = torch.ones(numbers)
    opts = AllreduceOptions()
    opts.asyncOp = True
    group._pg.allreduce([x], opts).wait()
    return float(x[-1])


def a_replica_dies(deaths: int) -> list[Any]:
    """Lose the last rank again and again; return what the sums were, and what was raised."""
    group = made()
    found: list[Any] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for death in range(deaths):
        group.configure(PrefixStore(f"quorum{death}", store), rank, size - death)
        found.append(total(group, 1000))
        if rank == size - death - 1:
            os._exit(1)
        try:
            total(group, 1 << 20)
        except PeerLost as error:
            found.append(str(error))
    group.configure(PrefixStore("last", store), rank, size - deaths)
    found.append(total(group, 1000))
    group.shutdown()
    return found


@pytest.mark.parametrize(("size", "deaths"), [(2, 1), (4, 2)])
def test_the_rest_goes_on_in_the_same_processes(worlds: Any, size: int, deaths: int) -> None:
    world = worlds.fresh(size)
    found = world.outcomes(a_replica_dies, deaths)
    assert found[size - deaths :] == [None] * deaths  # gone
    for told in found[: size - deaths]:
        assert [one for one in told if isinstance(one, float)] == [
            float(size - death) for death in range(deaths + 1)
        ]
        lost = [one for one in told if isinstance(one, str)]
        assert all(f"Rank {size - death - 1}" in one for death, one in enumerate(lost))
        assert len(lost) == deaths
    world.close()


def test_without_torchft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(MissingPackageError, match="torchft-nightly"):
        process_group()
