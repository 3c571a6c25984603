"""Checkpoints: bit for bit, under any strategy and number of ranks, whatever dies on the way."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import roundelay as rd  # noqa: E402 - only with torch
from checkpoints import STRATEGIES, small  # noqa: E402
from roundelay.errors import (  # noqa: E402
    CheckpointError,
    CheckpointMismatch,
    InvalidArgumentError,
    RankFailed,
    UnsendableError,
)
from roundelay.training.checkpoint import _manifest as form  # noqa: E402
from roundelay.training.checkpoint import save as checkpoint  # noqa: E402
from roundelay.training.checkpoint.values import pack, unpack  # noqa: E402

SYNCHRONOUS = [name for name, one in STRATEGIES.items() if one.synchronous]


def ranks_for(name: str, size: int) -> int:
    """A strategy with two servers, or one of its own, needs two ranks."""
    return max(size, 2) if name.startswith("ps by") else size


def dump(path: Path) -> dict[str, Any]:
    """Put a checkpoint together by hand, from its JSON and safetensors files alone."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    files = [
        safetensors.load_file(path / manifest["folder"] / one["name"]) for one in manifest["files"]
    ]
    entries = {
        **{f"parameter/{name}": one for name, one in manifest["parameters"].items()},
        **{f"buffer/{name}": one for name, one in manifest["buffers"].items()},
        **{
            f"state.{key}/{name}": one
            for name, table in manifest["elements"].items()
            for key, one in table.items()
        },
    }
    whole = {}
    for key, entry in entries.items():
        parts = [files[at["file"]][f"{key}@{at['start']}"] for at in entry["where"]]
        whole[key] = torch.cat(parts).view(entry["shape"])
    for name, table in manifest["whole"].items():
        for key, value in table.items():
            entry = manifest["tensors"][value["of"]]
            at = entry["where"][0]["file"]
            whole[f"state.{key}/{name}"] = files[at][f"value/{value['of']}@0"].view(entry["shape"])
    return whole


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


def groups_of(model: Any) -> list[dict[str, Any]]:
    bias = [one for name, one in model.named_parameters() if "bias" in name]
    rest = [one for name, one in model.named_parameters() if "bias" not in name]
    return [{"params": bias, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}]


def train(comm: Any, hand: Any, model: Any, batches: Any, **options: Any) -> tuple[Any, Any]:
    mine = hand.copy(model)
    mine, optimizer = rd.prepare(
        mine, torch.optim.AdamW(groups_of(mine), lr=1e-2), comm=comm, **options
    )
    go_on(hand, mine, optimizer, batches)
    return mine, optimizer


def go_on(hand: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for tokens, targets in batches:
        optimizer.scale(hand.loss(model, tokens, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- bit for bit


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_ranks_and_strategies_read_every_bit(
    awkward: Any, tmp_path: Path, name: str, precision: str
) -> None:
    """4 → 3 → 1 → 2 ranks, from this strategy through others and back to it."""
    model, batches = awkward.model(torch.float32), awkward.batches(4)

    def write(comm: Any) -> None:
        trained = train(
            comm, awkward, model, batches, strategy=STRATEGIES[name], precision=precision
        )
        rd.save(tmp_path / "0", *trained)

    rd.run(write, 4, "threads")
    first = dump(tmp_path / "0")
    assert any(key.startswith("state.exp_avg_sq/layers.0") for key in first)
    others = ["zero3", "ddp", "zero2", name]
    for turn, (size, other) in enumerate(zip((3, 1, 2, 2), others, strict=True), start=1):

        def copy_on(comm: Any, turn: int = turn, other: str = other) -> None:
            mine, optimizer = train(
                comm, awkward, model, [], strategy=STRATEGIES[other], precision=precision
            )
            loaded = rd.load(tmp_path / f"{turn - 1}", mine, optimizer)
            assert loaded.steps == len(batches)
            rd.save(tmp_path / f"{turn}", mine, optimizer)

        rd.run(copy_on, ranks_for(other, size), "threads")
        same(first, dump(tmp_path / f"{turn}"))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, word)
        for name in SYNCHRONOUS
        for word in ("fp32", "bf16", "fp16")
        if word != "fp16" or not name.startswith("ps by")  # servers take no scaled loss
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(
    awkward: Any, tmp_path: Path, name: str, precision: str
) -> None:
    model, batches = awkward.model(torch.float32), awkward.batches(8)
    options = {"strategy": STRATEGIES[name], "precision": precision}

    def whole(comm: Any) -> dict[str, Any]:
        trained, _ = train(comm, awkward, model, batches, **options)
        return {key: one.clone() for key, one in rd.full_state_dict(trained).items()}

    def stop(comm: Any) -> None:
        rd.save(tmp_path / "it", *train(comm, awkward, model, batches[:4], **options))

    def resume(comm: Any) -> tuple[dict[str, Any], Any]:
        trained, optimizer = train(comm, awkward, model, [], **options)
        rd.load(tmp_path / "it", trained, optimizer)
        go_on(awkward, trained, optimizer, batches[4:])
        scaler = optimizer.run.setup.scaler
        scale = None if scaler is None else scaler.state()
        return {key: one.clone() for key, one in rd.full_state_dict(trained).items()}, scale

    expected = rd.run(whole, 3, "threads")[0]
    rd.run(stop, 3, "threads")
    found, scale = rd.run(resume, 3, "threads")[0]
    same(expected, found)
    assert (scale is None) == (precision != "fp16")
    if scale is not None:
        assert scale["good"] + scale["skipped"] >= len(batches) or scale["skipped"] > 0


class Dropping(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Uses all the random numbers there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = torch.nn.functional.dropout(x, 0.5, self.training)
        return self.norm(self.inner(x)) * random.random() * np.random.rand()  # noqa: NPY002

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [2, 2, 5], 0.5),
    "plateau": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=1),
    "one cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=20),
    "one after another": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [torch.optim.lr_scheduler.ConstantLR(one, 0.1, 3), torch.optim.lr_scheduler.StepLR(one, 2)],
        [3],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_random_numbers_schedules_buffers_and_extra_state_go_on_too(
    tmp_path: Path, schedule: str
) -> None:
    model = Dropping()
    x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(2))

    def be_rank(comm: Any, first: int, last: int, *, save: bool, load: bool) -> Any:
        torch.manual_seed(100 + comm.rank)
        random.seed(comm.rank)
        np.random.seed(comm.rank)  # noqa: NPY002 - what programs use without asking
        mine = copy.deepcopy(model)
        mine, optimizer = rd.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1), comm=comm)
        scheduler = SCHEDULERS[schedule](optimizer)
        if load:
            loaded = rd.load(tmp_path / "it", mine, optimizer, scheduler=scheduler)
            assert loaded.extra == {"epoch": 3, "best": float("-inf"), "names": ("a", 2)}
        for step in range(first, last):
            loss = (mine(x[step]) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        if save:
            extra = {"epoch": 3, "best": float("-inf"), "names": ("a", 2)}
            rd.save(tmp_path / "it", mine, optimizer, scheduler=scheduler, extra=extra)
        told = {key: one.numpy() for key, one in rd.full_state_dict(mine).items()
                if isinstance(one, torch.Tensor)}  # fmt: skip
        drawn = random.random(), np.random.rand()  # noqa: NPY002 - likewise
        return told, mine.calls, optimizer.param_groups[0]["lr"], drawn

    def world(*span: int, save: bool = False, load: bool = False) -> list[Any]:
        return rd.run(lambda comm: be_rank(comm, *span, save=save, load=load), 2, "shared_memory")

    expected = world(0, 8)
    world(0, 4, save=True)
    for rank, (one, other) in enumerate(zip(expected, world(4, 8, load=True), strict=True)):
        assert one[1:] == other[1:], rank
        for key in one[0]:
            assert (one[0][key] == other[0][key]).all(), key


def test_ranks_that_are_new_get_seeds_of_their_own_the_same_every_time(tmp_path: Path) -> None:
    def start(comm: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        return rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)

    def write(comm: Any) -> float:
        torch.manual_seed(comm.rank)
        rd.save(tmp_path / "it", *start(comm))
        return float(torch.rand(()))

    def read(comm: Any) -> float:
        rd.load(tmp_path / "it", *start(comm))
        return float(torch.rand(()))

    before = rd.run(write, 2, "shared_memory")
    once, twice = (rd.run(read, 4, "shared_memory") for _ in range(2))
    assert once == twice
    assert len(set(once)) == 4
    assert once[:2] == before


def test_masters_are_saved_whole_and_read_in_any_precision(awkward: Any, tmp_path: Path) -> None:
    model, batches = awkward.model(torch.float32), awkward.batches(3)
    words = ["fp16", "fp32", "bf16"]

    def write(comm: Any) -> None:
        rd.save(tmp_path / "0", *train(comm, awkward, model, batches, precision=words[0]))

    rd.run(write, 2, "threads")
    for turn, word in enumerate(words[1:], start=1):

        def copy_on(comm: Any, turn: int = turn, word: str = word) -> None:
            mine, optimizer = train(comm, awkward, model, [], precision=word, strategy="zero1")
            rd.load(tmp_path / f"{turn - 1}", mine, optimizer)
            for one in mine.parameters():
                assert one.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[word]
            rd.save(tmp_path / f"{turn}", mine, optimizer)

        rd.run(copy_on, 3, "threads")
    trained = {key for key in dump(tmp_path / "0") if "frozen" not in key}
    one, other = dump(tmp_path / "0"), dump(tmp_path / "2")
    same({key: one[key] for key in trained}, {key: other[key] for key in trained})


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_every_rank_writes_its_share(tmp_path: Path, name: str) -> None:
    def write(comm: Any) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(8)))
        model, optimizer = rd.prepare(
            model, torch.optim.Adam(model.parameters()), comm=comm, strategy=name
        )
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        rd.save(tmp_path / "it", model, optimizer)

    rd.run(write, 4, "threads")
    files = list((tmp_path / "it").glob("parts-*/*.safetensors"))
    assert len(files) == 4
    share = 8 * (10_000 + 100) * 4 * 3 / 4  # parameters and two moments, a quarter of them
    for file in files:
        assert share <= file.stat().st_size <= share + 30_000  # random numbers, and names


# ---- faults


def weight_at(path: Path) -> float:
    """The weight of the checkpoint that is there, loaded on one rank."""

    def read(comm: Any) -> float:
        model, optimizer = small(comm, -1.0)
        rd.load(path, model, optimizer)
        assert (model.weight == model.weight[0, 0]).all()
        return float(model.weight.detach()[0, 0])

    return float(rd.run(read, 1, "threads")[0])


def save_with(path: Path, weight: float, before: Callable[[int, int], None] | None, *,
              engine: str) -> list[Any]:  # fmt: skip
    """Save on two ranks; `before` hears of every call to the disk, by rank and number."""
    here = threading.local()

    def heard(_: str) -> None:
        here.count += 1
        if before is not None:
            before(here.rank, here.count)

    def be_rank(comm: Any) -> Any:
        here.rank, here.count = comm.rank, 0
        try:
            rd.save(path, *small(comm, weight))
        except CheckpointError as error:
            return str(error)
        return here.count

    checkpoint.DISK.before = heard
    try:
        return rd.run(be_rank, 2, engine)
    finally:
        checkpoint.DISK.before = None


def test_killed_at_any_moment_the_old_one_or_the_new_one_is_there_whole(tmp_path: Path) -> None:
    path = tmp_path / "it"
    counts = save_with(path, 1.0, None, engine="shared_memory")
    assert min(counts) > 5
    old, seen = 1.0, set()
    for rank in range(2):
        for at in range(1, counts[rank] + 2):

            def kill(who: int, number: int, rank: int = rank, at: int = at) -> None:
                if (who, number) == (rank, at):
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                save_with(path, old + 1, kill, engine="shared_memory")
                done = True
            except RankFailed as error:
                assert error.rank == rank
                done = False
            found = weight_at(path)
            assert found in ((old + 1,) if done else (old, old + 1)), (rank, at)
            seen.add((done, found - old))
            old = found
    # It was killed before and after the stroke, and it came to its end.
    assert seen == {(False, 0.0), (False, 1.0), (True, 1.0)}
    save_with(path, 99.0, None, engine="threads")
    assert len(list(path.iterdir())) == 2  # nothing of all that is left


def test_an_error_at_any_moment_is_raised_on_all_ranks_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "it"
    counts = save_with(path, 1.0, None, engine="threads")
    for rank in range(2):
        for at in range(1, counts[rank] + 1):

            def fail(who: int, number: int, rank: int = rank, at: int = at) -> None:
                if (who, number) == (rank, at):
                    raise OSError(28, "No space left on device", "the file")

            told = save_with(path, 2.0, fail, engine="threads")
            for one in told:
                assert f"rank {rank}: No space left on device: the file" in one, (rank, at)
            found = weight_at(path)
            assert found in (1.0, 2.0)
            if found == 2.0:  # it failed after the stroke
                save_with(path, 1.0, None, engine="threads")
            assert len(list(path.iterdir())) == 2


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with little room."""
    where = tmp_path / "little"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(where)],
        check=False, capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_fills_is_named_on_all_ranks_and_the_old_one_stays(little_disk: Path) -> None:
    path = little_disk / "it"
    save_with(path, 1.0, None, engine="threads")

    def be_rank(comm: Any) -> str:
        model = torch.nn.Linear(300, 300)
        trained = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        try:
            rd.save(path, *trained)
        except CheckpointError as error:
            return str(error)
        return "nothing was raised"

    for told in rd.run(be_rank, 2, "shared_memory"):
        assert "No space left on device" in told
    assert weight_at(path) == 1.0
    assert len(list(path.iterdir())) == 2


# ---- files that are not what was written


def load_on_all(path: Path, make: Callable[[Any], tuple[Any, Any]]) -> list[str]:
    def be_rank(comm: Any) -> str:
        try:
            rd.load(path, *make(comm))
        except CheckpointError as error:
            return str(error)
        return "nothing was raised"

    return rd.run(be_rank, 2, "threads")


def test_every_file_that_is_cut_changed_or_gone_is_named_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "it"
    save_with(path, 1.0, None, engine="threads")
    files = [path / "checkpoint.json", *sorted(path.glob("parts-*/*"))]
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        flips = range(0, len(whole), max(1, len(whole) // 50))
        flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flips]
        for text in [b"", whole[:-1], whole[: len(whole) // 2], whole + b"\0", *flipped]:
            file.write_bytes(text)
            if text.strip() != whole.strip():  # the space at the end is nobody's
                for told in load_on_all(path, lambda comm: small(comm, 0.0)):
                    assert file.name in told, told
        file.unlink()
        for told in load_on_all(path, lambda comm: small(comm, 0.0)):
            assert file.name in told, told
        file.write_bytes(whole)
    assert weight_at(path) == 1.0


def test_a_manifest_can_not_reach_outside_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "it"
    save_with(path, 1.0, None, engine="threads")
    manifest = form.decode((path / form.MANIFEST).read_bytes(), path)
    for change in ({"folder": "../.."}, {"folder": "/etc"},
                   {"files": [form.File("../x.safetensors", 1, "")]}):  # fmt: skip
        evil = form.encode(msgspec.structs.replace(manifest, sha256="", **change))
        (path / form.MANIFEST).write_bytes(evil)
        for told in load_on_all(path, lambda comm: small(comm, 0.0)):
            assert "no checkpoint has" in told


def test_another_models_checkpoint_is_told_apart_by_names_and_shapes(tmp_path: Path) -> None:
    def first(comm: Any) -> tuple[Any, Any]:
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(3, 2), "b": torch.nn.BatchNorm1d(2), "c": torch.nn.Linear(2, 2)}
        )
        return rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)

    def second(comm: Any) -> tuple[Any, Any]:
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(2, 2), "d": torch.nn.Linear(2, 2)}
        )
        return rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)

    rd.run(lambda comm: rd.save(tmp_path / "it", *first(comm)), 2, "threads")
    for told in load_on_all(tmp_path / "it", second):
        assert "parameter a.weight: (5, 3) here, (2, 3) in the checkpoint" in told
        assert "parameter b.weight: (2, 2) here, (2,) in the checkpoint" in told
        assert "parameter d.bias: (2,) here, not in the checkpoint" in told
        assert "parameter c.weight: (2, 2) in the checkpoint, not here" in told
        assert "buffer b.running_mean: (2,) in the checkpoint, not here" in told


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda one: torch.optim.Adam(one.parameters()), "Adam here, SGD in the checkpoint"),
        (lambda one: torch.optim.SGD([{"params": [one.weight]}, {"params": [one.bias]}], lr=0.1),
         "2 groups here, 1 in the checkpoint"),
    ],
)  # fmt: skip
def test_another_optimizers_checkpoint_is_told_apart(tmp_path: Path, make: Any, told: str) -> None:
    save_with(tmp_path / "it", 1.0, None, engine="threads")

    def other(comm: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 1)
        return rd.prepare(model, make(model), comm=comm)

    for found in load_on_all(tmp_path / "it", other):
        assert told in found


def test_wrong_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    save_with(tmp_path / "it", 1.0, None, engine="threads")

    def be_rank(comm: Any) -> None:
        model, optimizer = small(comm, 1.0)
        with pytest.raises(InvalidArgumentError, match=r"rd\.prepare"):
            rd.save(tmp_path / "new", torch.nn.Linear(2, 2), optimizer)
        with pytest.raises(InvalidArgumentError, match="optimizer"):
            rd.save(tmp_path / "new", model, torch.optim.SGD(model.parameters(), lr=0.1))
        with rd.accumulate(model), pytest.raises(InvalidArgumentError, match="between steps"):
            rd.save(tmp_path / "new", model, optimizer)
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            rd.load(tmp_path / "new", model, optimizer)
        with pytest.raises(CheckpointError, match="rank 0"):
            rd.save(tmp_path / "file", model, optimizer)
        with pytest.raises(CheckpointMismatch, match="scheduler"):
            rd.load(tmp_path / "it", model, optimizer,
                    scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))  # fmt: skip
        with pytest.raises((UnsendableError, CheckpointError), match=r"extra\['f'\] is a function"):
            rd.save(tmp_path / "it", model, optimizer, extra={"f": small})

    rd.run(be_rank, 2, "threads")
    assert weight_at(tmp_path / "it") == 1.0
    assert (tmp_path / "file").read_text() == "here already"


# ---- values


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9), inner, max_size=3)
        | st.dictionaries(st.integers(-9, 9), st.integers(0, 9), max_size=3).map(Counter)
        | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_values_come_back_as_they_went(value: Any) -> None:
    text = json.dumps(pack(value, str, "it"), allow_nan=False)
    found = unpack(json.loads(text), lambda name: name)
    assert repr(found) == repr(value)


def test_tensors_and_arrays_come_back_as_they_went() -> None:
    kept: dict[str, Any] = {}

    def put(tensor: Any) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    value = {"a": torch.arange(3), "b": [np.float32(0.5), np.zeros((2, 0)), np.array(7)]}
    found = unpack(json.loads(json.dumps(pack(value, put, "it"))), kept.__getitem__)
    assert torch.equal(found["a"], torch.arange(3))
    assert found["b"][0] == 0.5
    assert found["b"][1].shape == (2, 0)
    assert found["b"][2].shape == ()
    for bad in (object(), small, {1, 2}, 1 << 63, np.array([None])):
        with pytest.raises(UnsendableError, match=r"it\[0\]"):
            pack([bad], put, "it")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_parameter_of_no_elements_comes_back(tmp_path: Path, name: str, size: int) -> None:
    """Whatever comes before and after it, and wherever it lies."""

    def made(comm: Any) -> tuple[Any, Any]:
        model = torch.nn.Sequential(
            torch.nn.Embedding(0, 3), torch.nn.Linear(2, 2), torch.nn.Embedding(0, 4),
            torch.nn.Linear(2, 3), torch.nn.Embedding(0, 2),
        )  # fmt: skip
        own = torch.optim.Adam(model.parameters())
        return rd.prepare(model, own, strategy=STRATEGIES[name], comm=comm)

    def write(comm: Any) -> dict[str, Any]:
        model, optimizer = made(comm)
        model[3](model[1](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        rd.save(tmp_path / "it", model, optimizer)
        return {key: one.clone() for key, one in rd.full_state_dict(model).items()}

    def read(comm: Any) -> dict[str, Any]:
        model, optimizer = made(comm)
        rd.load(tmp_path / "it", model, optimizer)
        return {key: one.clone() for key, one in rd.full_state_dict(model).items()}

    before, after = (rd.run(work, size, "threads") for work in (write, read))
    whole = before[0] or before[-1]  # a rank may be a server
    same(after[0] or after[-1], whole)
    same(rd.read_checkpoint(tmp_path / "it").state_dict(), whole)
