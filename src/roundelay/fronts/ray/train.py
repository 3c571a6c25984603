"""Ranks for Ray Train: workers are ranks while the training function runs."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from ray.train import get_context
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from roundelay.arguments import shown
from roundelay.errors import InvalidArgumentError, RendezvousError
from roundelay.fronts.ray.store import check_engine, forget, join, wait_limit
from roundelay.launch.script import be_rank

__all__ = ["RoundelayConfig", "RoundelayTrainer"]

#: What the workers of one attempt have in common, told to each before it begins.
_token: str | None = None


@dataclass
class RoundelayConfig(BackendConfig):  # type: ignore[misc] # ray is optional, so without types
    """Makes every worker of Ray Train a rank: `rd.init()` is the communicator of all workers.

    `timeout` is how long ranks wait for one another, in seconds; 60 unless ROUNDELAY_TIMEOUT says
    otherwise. Ranks of one node share memory and nodes are joined by Gloo, unless `engine` names
    one for all ranks: gloo or nccl.
    """

    timeout: float | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        wait_limit(self.timeout)

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts and ends with the workers."""
        return RoundelayBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """What the training function runs in, on every worker."""
        return partial(_as_rank, self.timeout, self.engine)

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray shows of it."""
        return asdict(self)


class RoundelayBackend(Backend):  # type: ignore[misc] # as above
    """Tells the workers of an attempt by what they find one another, and cleans up after them."""

    _given: str | None = None

    def on_start(self, worker_group: Any, backend_config: RoundelayConfig) -> None:
        """Give all workers one token; after a failure, the next ones get another."""
        del backend_config
        self._given = secrets.token_hex(16)
        worker_group.execute(_take_token, self._given)

    def on_shutdown(self, worker_group: Any, backend_config: RoundelayConfig) -> None:
        """Leave nothing in Ray's store."""
        del worker_group, backend_config
        if self._given is not None:
            forget(self._given)
            self._given = None


class RoundelayTrainer(DataParallelTrainer):  # type: ignore[misc] # as above
    """A trainer whose workers are ranks: `RoundelayTrainer(train, scaling_config=…).fit()`.

    Takes what Ray's own trainers take. In the training function `rd.init()` returns the
    communicator, on which `rd.prepare` and all else of Roundelay work.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        roundelay_config: RoundelayConfig | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        **more: Any,  # that later versions of Ray add
    ) -> None:
        if not isinstance(roundelay_config, RoundelayConfig | None):
            raise InvalidArgumentError(
                f"roundelay_config of RoundelayTrainer is rd.ray.RoundelayConfig(…), not "
                f"{shown(roundelay_config)}."
            )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=roundelay_config or RoundelayConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            **more,
        )


def _take_token(token: str) -> None:
    global _token  # noqa: PLW0603 - a worker is in one group
    _token = token


@contextlib.contextmanager
def _as_rank(timeout: float | None, engine: str | None) -> Iterator[None]:
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if _token is None and size > 1:
        raise RendezvousError(
            f"rank {rank} of {size} was not told by what it finds the others: Ray Train has not "
            f"started RoundelayConfig's backend. Pass it as backend_config of the trainer itself."
        )
    joining = partial(join, _token or "alone", rank, size, timeout=timeout, engine=engine)
    with be_rank(joining, _function_of_caller()):
        yield


def _function_of_caller() -> Callable[..., Any] | None:
    """Return the user's function that Ray is about to call, for errors to name; None if unseen."""
    frame = inspect.currentframe()
    while frame is not None:
        if callable(found := frame.f_locals.get("train_func")):
            return cast("Callable[..., Any]", found)
        frame = frame.f_back
    return None
