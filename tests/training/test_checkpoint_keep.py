"""Which checkpoints stay and which go: only complete older ones of ours, in any circumstances."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

import roundelay as rd  # noqa: E402 - only with torch
from checkpoints import small  # noqa: E402
from roundelay.errors import InvalidArgumentError, RoundelayError  # noqa: E402
from roundelay.training.checkpoint import save as checkpoint  # noqa: E402


def save(path: Path, weight: float = 0.0, *, ranks: int = 1, **options: Any) -> None:
    def be_rank(comm: Any) -> None:
        rd.save(path, *small(comm, weight), **options)

    rd.run(be_rank, ranks, "threads")


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_few_stay(tmp_path: Path, keep: int, wait: bool) -> None:  # noqa: FBT001
    for step in (8, 9, 10, 11, 7):  # by time, not by number: training went back to step 6
        save(tmp_path / f"step-{step}", step, ranks=2, keep=keep, wait=wait)
    assert names(tmp_path) == sorted(f"step-{step}" for step in (9, 10, 11, 7)[-keep:])
    latest = rd.latest_checkpoint(tmp_path)
    assert latest == tmp_path / "step-7"
    assert (rd.read_checkpoint(latest).weights["weight"] == 7).all()


def test_nothing_else_goes(tmp_path: Path) -> None:
    """Other series, other people's folders, what is not complete, and what is only linked."""
    for name in ("step-1", "step-2", "other-1", "step-1b", "latest", "step-6"):
        save(tmp_path / name)
    (tmp_path / "step-2" / "notes.txt").write_text("mine")
    (tmp_path / "step-3").mkdir()  # somebody's, empty
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "model.pt").write_text("mine")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-5")
    (tmp_path / "step-5" / "checkpoint.json").unlink()  # not complete
    next((tmp_path / "step-6").glob("parts-*/*")).write_bytes(b"")  # broken
    (tmp_path / "step-7").symlink_to(tmp_path / "other-1")
    (tmp_path / "step-8").write_text("a file")
    before = names(tmp_path)
    save(tmp_path / "step-9", keep=1)
    assert names(tmp_path) == sorted({*before, "step-9"} - {"step-1"})
    assert names(tmp_path / "step-2") == ["notes.txt"]
    assert names(tmp_path / "step-4") == ["model.pt"]
    assert rd.latest_checkpoint(tmp_path) == tmp_path / "step-9"


def test_an_end_at_any_moment_of_removing_leaves_a_good_one_and_the_next_save_tidies_up(
    tmp_path: Path,
) -> None:
    """An end is an exception here, which no part of a save catches."""
    save(tmp_path / "step-1", 1, keep=1)
    done, step = 0, 1

    for at in range(1, 50):
        count = 0
        step += 1

        def end(_: str, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise KeyboardInterrupt

        checkpoint.DISK.before = end
        try:
            save(tmp_path / f"step-{step}", step, keep=1)
            done += 1
        except KeyboardInterrupt:
            pass
        checkpoint.DISK.before = None
        latest = rd.latest_checkpoint(tmp_path)
        assert latest is not None
        kept = int(latest.name.removeprefix("step-"))
        assert (rd.read_checkpoint(latest).weights["weight"] == kept).all()
        step += 1
        save(tmp_path / f"step-{step}", step, keep=1)
        whole = [name for name in names(tmp_path) if names(tmp_path / name)]
        assert whole == [f"step-{step}"]
        if done:
            break
        for name in names(tmp_path):
            if name not in whole:
                (tmp_path / name).rmdir()  # what was begun and came to nothing
    assert done
    assert at > 15


@pytest.mark.parametrize(
    ("name", "keep", "told"),
    [("best", 3, "ends in a number"), ("step-3x", 3, "ends in a number"),
     ("3.pt", 3, "ends in a number"), ("step-1", 0, "from 1"), ("step-1", True, "from 1"),
     ("step-1", 2.5, "from 1")],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(tmp_path: Path, name: str, keep: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        save(tmp_path / name, keep=keep)
    assert names(tmp_path) == []


def test_there_may_be_no_latest_one(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    assert rd.latest_checkpoint(tmp_path) is None
    assert rd.latest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_scheduler_without_state_is_refused_by_name(tmp_path: Path, call: str) -> None:
    def be_rank(comm: Any) -> str:
        model = torch.nn.Linear(3, 2)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, comm=comm)
        scheduler = torch.optim.lr_scheduler.LinearLR(own)
        rd.save(tmp_path / "one", model, own, scheduler=scheduler)
        with pytest.raises(RoundelayError) as error:
            getattr(rd, call)(tmp_path / "one", model, own, scheduler=3)
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert f"scheduler of {call} has" in told
        assert "3 has not" in told
