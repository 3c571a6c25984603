"""Ray Train with ranks: the training function is a rank on every worker, and so it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import (
    CollectiveMismatch,
    InvalidArgumentError,
    PeerLost,
    RendezvousError,
    UnknownNameError,
)

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'roundelay[ray]'")
train: Any = pytest.importorskip("ray.train", reason="needs ray[train]")
trainers: Any = pytest.importorskip("ray.train.v2.api.data_parallel_trainer")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers have no tests

EXAMPLE = Path(__file__).parents[3] / "examples" / "17_ray.py"


def fitted(loop: Any, workers: Any, folder: Path, **options: Any) -> Any:
    run = train.RunConfig(storage_path=str(folder))
    scale = train.ScalingConfig(num_workers=workers)
    return rd.ray.RoundelayTrainer(loop, scaling_config=scale, run_config=run, **options).fit()


def causes(error: Any) -> dict[int, Any]:
    """Return what every worker raised, without what Ray has put around it."""
    failures = error.worker_failures.items()
    return {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures}


@pytest.mark.usefixtures("one_node")
def test_workers_are_ranks_in_an_elastic_group_under_any_trainer(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        comm = rd.init()
        context = train.get_context()
        same = (comm.rank, comm.size) == (context.get_world_rank(), context.get_world_size())
        total = comm.all_reduce(np.full(2, config["each"]))
        engine = type(comm._engine).__name__
        return same, rd.init() is comm, total.tolist(), engine, "torch" in sys.modules

    found = trainers.DataParallelTrainer(
        loop,
        train_loop_config={"each": 2.0},
        backend_config=rd.ray.RoundelayConfig(timeout=30),
        scaling_config=train.ScalingConfig(num_workers=(1, 3)),
        run_config=train.RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert found.return_value == (True, True, [6.0, 6.0], "SharedMemory", False)


@pytest.mark.usefixtures("one_node")
def test_an_exception_of_one_worker_reaches_the_others(tmp_path: Path) -> None:
    def loop() -> None:
        comm = rd.init()
        if comm.rank == 1:
            raise ValueError("bad row")
        try:
            comm.barrier()
        except PeerLost as error:
            (tmp_path / "told").write_text(str(error))
            raise

    with pytest.raises(train.WorkerGroupError) as caught:
        fitted(loop, 2, tmp_path)
    assert repr(causes(caught.value)[1]) == "ValueError('bad row')"
    told = (tmp_path / "told").read_text()
    assert "Rank 1" in told
    assert "ValueError: bad row" in told


@pytest.mark.usefixtures("one_node")
def test_a_worker_that_returns_too_soon_is_named(tmp_path: Path) -> None:
    def loop() -> None:
        comm = rd.init()
        if comm.rank == 1:
            comm.barrier()

    with pytest.raises(train.WorkerGroupError) as caught:
        fitted(loop, 2, tmp_path)
    assert causes(caught.value)
    for cause in causes(caught.value).values():
        assert isinstance(cause, CollectiveMismatch)
        assert "rank 0: returned from its function at" in str(cause)
        assert f"{Path(__file__).name}:{loop.__code__.co_firstlineno}" in str(cause)


@pytest.mark.usefixtures("one_node")
def test_local_mode_is_one_rank(tmp_path: Path) -> None:
    assert fitted(lambda: rd.init().size, 0, tmp_path).return_value == 1
    assert rd.ray.RoundelayConfig(timeout=3, engine="gloo").to_dict() == {
        "timeout": 3,
        "engine": "gloo",
    }


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no 'glooo'\. Did you mean 'gloo'"):
        rd.ray.RoundelayConfig(engine="glooo")
    with pytest.raises(UnknownNameError, match="engines for ranks of Ray has no 'mpi'"):
        rd.ray.RoundelayConfig(engine="mpi")
    with pytest.raises(InvalidArgumentError, match="timeout is a positive number"):
        rd.ray.RoundelayConfig(timeout=-1)
    with pytest.raises(InvalidArgumentError, match=r"is rd\.ray\.RoundelayConfig\(…\), not 'gloo'"):
        rd.ray.RoundelayTrainer(print, roundelay_config="gloo")  # type: ignore[arg-type]


def test_a_context_without_its_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundelay.fronts.ray import train as ours  # noqa: PLC0415 - which needs ray

    class Context:
        get_world_rank = staticmethod(lambda: 1)
        get_world_size = staticmethod(lambda: 2)

    monkeypatch.setattr(ours, "get_context", Context)
    with (
        pytest.raises(RendezvousError, match="rank 1 of 2 was not told"),
        rd.ray.RoundelayConfig().train_func_context(),
    ):
        pass


def test_the_example_is_restarted_from_its_checkpoint(rays: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rays.end()  # it starts its own
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    due = EXAMPLE.read_text().partition("Prints, beside what Ray tells:\n\n")[2].splitlines()[0]
    assert due.strip() in done.stdout.splitlines()
