"""Whatever is passed to what trains is taken, or refused by an error of ours: none from within."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import (  # noqa: E402
    CheckpointError,
    CollectiveMismatch,
    InvalidArgumentError,
    RoundelayError,
)

Data = torch.utils.data
ROWS = torch.arange(24.0, dtype=torch.float64).view(8, 3)
ODD: dict[str, Any] = {
    "None": None, "-1": -1, "5": 5, "2.5": 2.5, "''": "", "a word": "nope", "NUL": "a\0b",
    "bytes": b"x", "[]": [], "{}": {}, "an object": object(), "a scalar": torch.tensor(1.0),
    "a tensor": torch.ones(2, 3), "no dims": np.array(3), "True": True, "2**70": 2**70,
    "a long word": "x" * 5000,
}  # fmt: skip
Call = Callable[[Any], Any]


def plain() -> tuple[Any, Any]:
    model = torch.nn.Linear(3, 2).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def with_one(call: Callable[..., Any], **others: Any) -> Iterator[tuple[str, Call]]:
    """A function by each of its arguments, with the others as they should be."""
    for word in others:
        yield f"{call.__name__}: {word}", by(call, others, word)


def by(call: Callable[..., Any], others: dict[str, Any], word: str) -> Call:
    return lambda value: call(**{**others, word: value})


def of_loaders(comm: Any) -> Iterator[tuple[str, Call]]:
    given: dict[str, Any] = {"dataset": ROWS, "batch_size": 4, "comm": comm, "quiet": True}
    options = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
        "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order", "nonsense",
        "model", "micro_batch", "shuffle", "seed", "sampler", "drop_last", *given,
    )  # fmt: skip
    for word in options:
        yield f"loader: {word}", by(rd.loader, given, word)
    yield "loader: batch_sampler", by(rd.loader, {**given, "batch_size": None}, "batch_sampler")

    def load_state(**changed: Any) -> None:
        loader = rd.loader(**given)
        loader.load_state_dict(changed)
        list(loader)

    loader = rd.loader(**given)
    yield "loader: its state", loader.load_state_dict
    yield from with_one(load_state, **loader.state_dict())
    yield "loader: set_epoch", loader.set_epoch


def of_training(comm: Any) -> Iterator[tuple[str, Call]]:
    model, optimizer = rd.prepare(*plain(), comm=comm)

    def prepare(word: str, value: Any) -> None:
        own = dict(zip(("model", "optimizer"), plain(), strict=True))
        rd.prepare(**{**own, "comm": comm, word: value})

    def backward(loss_sum: Any = None, weight: Any = 1, model: Any = model) -> None:
        optimizer.zero_grad()
        rd.backward(model_loss() if loss_sum is None else loss_sum, weight=weight, model=model)

    def model_loss() -> Any:
        return model(ROWS).sum()

    def clip(how: str, *args: Any) -> None:
        optimizer.zero_grad()
        model_loss().backward()
        getattr(optimizer, how)(*args)

    for word in ("model", "optimizer", "comm", "strategy", "precision", "buffers"):
        yield f"prepare: {word}", partial(prepare, word)
    for name in ("unprepare", "full_state_dict", "whole", "whole_tensors", "staleness", "ledger",
                 "materialize", "scheduler", "latest_checkpoint"):  # fmt: skip
        yield name, getattr(rd, name)
    yield "accumulate", lambda value: rd.accumulate(value).__enter__()
    yield from with_one(backward, loss_sum=None, weight=1, model=model)
    for how in ("clip_grad_norm_", "clip_grad_value_"):
        yield how, partial(clip, how)
    yield "clip_grad_norm_: norm_type", partial(clip, "clip_grad_norm_", 1.0)
    yield "scale", rd.prepare(*plain(), precision="fp16", comm=comm)[1].scale
    yield "load_state_dict", rd.prepare(*plain(), strategy="zero3", comm=comm)[1].load_state_dict
    loader = rd.loader(ROWS, 4, comm=comm, quiet=True)
    yield from with_one(
        rd.evaluate, model=model, batches=loader, measure=lambda model, x: model(x).mean(), sums=()
    )

    def measure(give: Call, value: Any) -> None:
        rd.evaluate(model, loader, lambda *_: give(value))

    gives: list[Call] = [lambda one: one, lambda one: (1.0, one), lambda one: {"a": one}]
    for give in gives:
        yield "evaluate: what is measured", partial(measure, give)
    yield "SyncBatchNorm", rd.SyncBatchNorm
    yield "SyncBatchNorm: comm", lambda value: rd.SyncBatchNorm(3, comm=value)
    yield "convert", rd.SyncBatchNorm.convert


def of_checkpoints(comm: Any, folder: Path) -> Iterator[tuple[str, Call]]:
    model, optimizer = rd.prepare(*plain(), comm=comm)
    path, out = folder / "saved", folder / "out.safetensors"
    rd.save(path, model, optimizer)
    yield from with_one(rd.export, path=path, out=out, form="safetensors", dtype=None)
    yield from with_one(rd.read_checkpoint, path=path, dtype=None, device=None, check=True)
    both: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": None}
    yield from with_one(rd.load, path=path, strict=True, rename=None, **both)
    yield from with_one(rd.save, path=folder / "2", extra=None, keep=None, wait=True, **both)


def of_options() -> Iterator[tuple[str, Call]]:
    for kind in (rd.Zero, rd.Ddp, rd.ParameterServer, rd.Precision):
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}: {field.name}", by(kind, {}, field.name)


@pytest.mark.filterwarnings("ignore:This DataLoader")
def test_none_fails_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any write where nobody said."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    def be_rank(comm: Any) -> tuple[int, list[str]]:
        raw, count = [], 0
        every = of_loaders(comm), of_training(comm), of_checkpoints(comm, folder), of_options()
        for name, call in itertools.chain(*every):
            for word, value in ODD.items():
                count += 1
                try:
                    call(value)
                except RoundelayError:
                    continue
                except Exception as error:  # noqa: BLE001 - that is the question
                    raw.append(f"{name} = {word}: {type(error).__name__}: {error}")
        return count, raw

    count, raw = rd.run(be_rank, 1, "threads")[0]
    assert count > 1500
    assert not raw, "\n".join(raw)
    assert {one.name for one in tmp_path.iterdir()} <= {"checkpoints", "nope", "x" * 5000}


def divided(kind: str, rank: int, size: int) -> Any:
    """A dataset whose rows a program has divided between the ranks."""

    class Own(Data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 8 // size

        def __getitem__(self, row: int) -> Any:
            return ROWS[row * size + rank]

    whole = Data.TensorDataset(ROWS)
    ways: dict[str, Callable[[], Any]] = {
        "slice": lambda: ROWS[rank::size],
        "list": lambda: list(ROWS[rank::size]),
        "tensors": lambda: Data.TensorDataset(ROWS[rank::size]),
        "subset": lambda: Data.Subset(whole, range(rank, 8, size)),
        "joined": lambda: Data.ConcatDataset([Data.Subset(whole, [rank, rank + 2])] * 2),
        "its own": Own,
    }
    return ways[kind]()


@pytest.mark.parametrize("kind", ["slice", "list", "tensors", "subset", "joined", "its own"])
def test_rows_that_a_program_has_divided_are_refused(kind: str) -> None:
    def be_rank(comm: Any) -> None:
        with pytest.raises(CollectiveMismatch, match=r"rank 1.* others than rank 0's"):
            rd.loader(divided(kind, comm.rank, comm.size), 2, comm=comm, quiet=True)

    rd.run(be_rank, 2, "threads")


def test_rows_that_are_drawn_at_random_can_not_be_compared() -> None:
    """By the random numbers of all, which stay as they are, or by a rank's own."""

    class Drawn(Data.Dataset):  # type: ignore[misc, name-defined]
        def __init__(self, rank: int | None) -> None:
            self.own = None if rank is None else torch.Generator().manual_seed(rank)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, _: int) -> Any:
            return torch.rand(2, generator=self.own)

    def be_rank(comm: Any) -> None:
        for dataset in (Drawn(None), Drawn(comm.rank)):
            rd.loader(dataset, 2, comm=comm, quiet=True)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        due = torch.rand(1)
        torch.manual_seed(5)
        rd.run(be_rank, 3, "threads")
        assert torch.rand(1) == due


def test_messages_say_what_is_wrong(tmp_path: Path) -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = rd.prepare(*plain(), comm=comm)
        loader = rd.loader(ROWS, 4, comm=comm, quiet=True)
        measures: dict[str, Any] = {
            r"give it by name, \{'count'": lambda *_: 3,
            "is a number from 0, not -1": lambda *_: (1.0, -1),
            "names 'rihgt', and what is measured is 'right'": lambda *_: {"right": 1.0},
        }
        for told, measure in measures.items():
            sums = ("rihgt",) if "rihgt" in told else ()
            with pytest.raises(InvalidArgumentError, match=told):
                rd.evaluate(model, loader, measure, sums=sums)
        for told, options in {
            "the sampler has no rows": {"sampler": []},
            "by seed=": {"generator": torch.Generator()},
            "'num_worker'": {"num_worker": 1},
        }.items():
            with pytest.raises(InvalidArgumentError, match=told):
                rd.loader(ROWS, 4, comm=comm, quiet=True, **options)
        with pytest.raises(RoundelayError, match="more than 64 bits"):
            rd.save(tmp_path, model, extra=2**70)
        with pytest.raises(CheckpointError, match="no checkpoint at") as caught:
            rd.load(tmp_path / "nothing", model)
        assert "as it was" not in str(caught.value)
        model.bias = torch.nn.Parameter(model.bias.detach().clone())
        with pytest.raises(InvalidArgumentError, match="bias was replaced"):
            optimizer.step()

    rd.run(be_rank, 1, "threads")


def test_what_is_done_twice_or_too_late() -> None:
    def be_rank(comm: Any) -> None:
        model, optimizer = rd.prepare(*plain(), strategy="zero3", comm=comm)
        with pytest.raises(InvalidArgumentError, match=r"rd\.whole"):
            pickle.dumps(model)
        with pytest.raises(InvalidArgumentError, match=r"rd\.whole"):
            copy.deepcopy(model)
        scheduler = rd.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        model, optimizer = rd.unprepare(model)
        optimizer.step()
        scheduler.step()  # a plain one's again
        assert optimizer.param_groups[0]["lr"] == 0.05
        with pytest.raises(InvalidArgumentError, match=r"rd\.prepare"):
            rd.unprepare(model)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        model(ROWS).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.025

    rd.run(be_rank, 2, "threads")
