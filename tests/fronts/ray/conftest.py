"""Real local Rays, started once for all tests that want the same: one node, or a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

collect_ignore = ["drive.py"]  # a program that tests start, and that needs Ray
MEMORY = 100_000_000  # bytes of its object store, of which the tests need little


class Rays:
    """The Ray that runs now; another is started only after it has ended."""

    def __init__(self) -> None:
        self._now = ""
        self._cluster: Any = None

    def use(self, name: str, start: Callable[[], Any]) -> Any:
        """Have this one run."""
        if self._now != name:
            self.end()
            self._cluster = start()
            self._now = name
        return self._cluster

    def one_node(self) -> None:
        """Have a Ray of one node with four CPUs."""
        self.use("one node", start_one_node)

    def end(self) -> None:
        """Shut down what runs."""
        import ray  # noqa: PLC0415 - where there is none, nothing here is used

        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
        self._now, self._cluster = "", None


@pytest.fixture(scope="session")
def rays() -> Iterator[Rays]:
    started = Rays()
    yield started
    started.end()


def start_one_node() -> None:
    import ray  # noqa: PLC0415 - see above

    ray.init(
        num_cpus=4,
        object_store_memory=MEMORY,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"ROUNDELAY_TIMEOUT": "20"}},
    )


def start_cluster() -> Any:
    import ray  # noqa: PLC0415 - see above
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    return cluster


@pytest.fixture
def one_node(rays: Rays) -> None:
    """A Ray of one node with four CPUs; nothing of ours is left in it, nor on the host."""
    rays.one_node()


@pytest.fixture
def cluster(rays: Rays) -> Any:
    """A Ray of three nodes with one, two and two CPUs, all of them on this host."""
    return rays.use("cluster", start_cluster)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if {"one_node", "cluster"} & set(request.fixturenames):
        from ray.experimental import internal_kv  # noqa: PLC0415 - see above

        assert internal_kv._internal_kv_list("", namespace="roundelay") == []
        assert [path for path in Path("/dev/shm").iterdir() if "roundelay" in path.name] == []
        assert list(Path(os.environ["TMPDIR"]).glob("roundelay-*")) == []
