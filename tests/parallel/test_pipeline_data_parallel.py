"""Pipelines beside pipelines: each stage's replicas train by a strategy, and as one device does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.test_pipeline import (  # noqa: E402 - likewise
    EXACT,
    Words,
    _building,
    built,
    words_batch,
    words_loss,
)

from roundelay.errors import InvalidArgumentError  # noqa: E402 - only with torch

STEPS = 3
CLIP = 0.1
HALF = rd.Precision(compute=torch.float16, loss_scale=1024.0)  # at which nothing overflows here


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def alone(model: Any, batch: Any, steps: int = STEPS) -> tuple[list[float], list[float], Any, Any]:
    """Train one device; return its losses, the norms of its gradients, itself and its optimizer."""
    whole = copy.deepcopy(model)
    optimizer = adam(whole.parameters())
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = words_loss(whole(batch[0]), batch[1])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, whole, optimizer


def prepared(comm: rd.Communicator, model: Any, axes: dict[str, int], **options: Any) -> Any:
    """A mesh, and on it a pipeline and its optimizer."""
    chosen = {key: options.pop(key) for key in ("strategy", "precision") if key in options}
    mesh = rd.Mesh(comm=comm, **axes)
    with _building:
        mine = copy.deepcopy(model)
    pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss, **options)
    return mesh, *rd.prepare(pipe, adam(pipe.parameters()), mesh=mesh, **chosen)


def train(mesh: rd.Mesh, pipe: Any, optimizer: Any, batch: Any) -> tuple[list[float], list[float]]:
    """Train on this rank's rows; return the mean losses of all replicas, and norms."""
    count, place = mesh.size("dp"), mesh.place.get("dp", 0)
    rows = [part.tensor_split(count)[place] for part in batch]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = pipe.step(*rows)
        if "dp" in mesh:
            mesh["dp"].all_reduce(loss.view(1))
        losses.append(loss.item() / count)
        norms.append(float(optimizer.clip_grad_norm_(CLIP)))
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("word", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_every_strategy_on_top_of_every_schedule(strategy: str, word: str, size: int) -> None:
    """Losses, norms, weights and the optimizer's state are those of one device."""
    model, batch = built(Words), words_batch(16)
    losses, norms, whole, optimizer = alone(model, batch)
    weights, kept = whole.state_dict(), optimizer.state_dict()

    def body(comm: rd.Communicator) -> Any:
        axes = {"dp": 2, "pp": size // 2} if size < 8 else {"pp": 4, "dp": 2}
        mesh, pipe, mine = prepared(comm, model, axes, strategy=strategy, schedule=word,
                                    micro_batches=4)  # fmt: skip
        found = train(mesh, pipe, mine, batch)
        return *found, rd.full_state_dict(pipe), mine.state_dict()

    for mine, clipped, state, moments in rd.run(body, size, "threads"):
        assert mine == pytest.approx(losses, rel=EXACT)
        assert clipped == pytest.approx(norms, rel=EXACT)
        assert [*state] == [*weights]
        for name, value in state.items():
            assert float((value - weights[name]).abs().max()) <= EXACT, name
        assert moments["param_groups"] == kept["param_groups"]
        assert moments["state"].keys() == kept["state"].keys()
        for number, each in kept["state"].items():
            for key, value in each.items():
                off = float((moments["state"][number][key] - value).abs().max())
                assert off <= EXACT, (number, key)


def test_the_axes_of_data_stand_for_the_mesh() -> None:
    """`comm=mesh["dp"]` is right, too: the norm is that of all stages."""
    model, batch = built(Words), words_batch(16)
    _, norms, whole, _ = alone(model, batch)

    def body(comm: rd.Communicator) -> Any:
        mesh = rd.Mesh(dp=2, pp=2, comm=comm)
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss)
        pipe, optimizer = rd.prepare(pipe, adam(pipe.parameters()), comm=mesh["dp"])
        return train(mesh, pipe, optimizer, batch)[1], rd.full_state_dict(pipe)

    for clipped, state in rd.run(body, 4, "threads"):
        assert clipped == pytest.approx(norms, rel=EXACT)
        assert state.keys() == whole.state_dict().keys()


@pytest.mark.parametrize("given", ["other axes", "ranks of no mesh", "another mesh"])
def test_a_pipeline_without_its_mesh_is_refused(given: str) -> None:
    model = built(Words)

    def body(comm: rd.Communicator) -> str:
        mesh = rd.Mesh(dp=2, cp=1 if given == "another mesh" else 2, pp=2, comm=comm)
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss)
        own = comm.split(comm.rank)
        assert own is not None
        kinds: dict[str, dict[str, Any]] = {
            "other axes": {"comm": mesh["dp"]}, "ranks of no mesh": {"comm": own},
            "another mesh": {"mesh": rd.Mesh(dp=comm.size, comm=comm)},
        }  # fmt: skip
        with pytest.raises(InvalidArgumentError) as caught:
            rd.prepare(pipe, adam(pipe.parameters()), **kinds[given])
        return str(caught.value)

    size = 4 if given == "another mesh" else 8
    assert all("pp=2" in told and "mesh=mesh" in told for told in rd.run(body, size, "threads"))


@pytest.mark.parametrize("word", ["1f1b", "zb-h1"])
def test_gradients_go_to_replicas_once_a_step(word: str) -> None:
    """Two ranks of data parallel exchange as much whether a step has one micro-batch or four."""
    model, batch = built(Words), words_batch(16)

    def sent(micro_batches: int) -> list[int]:
        def body(comm: rd.Communicator) -> int:
            mesh, pipe, optimizer = prepared(comm, model, {"dp": 2, "pp": 2}, schedule=word,
                                             micro_batches=micro_batches)  # fmt: skip
            before = mesh["dp"].traffic()
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(*batch)
                optimizer.step()
            after = mesh["dp"].traffic()
            assert before is not None
            assert after is not None
            return int(after[0].sent - before[0].sent)

        return rd.run(body, 4, "threads")

    assert sent(1) == sent(4)


@pytest.mark.parametrize("word", ["gpipe", "interleaved-1f1b"])
def test_the_ledger_has_what_stages_send_and_keep(word: str) -> None:
    """What goes along pp is the messages, and beside them as much whatever the batch is."""
    model = built(Words)

    def body(comm: rd.Communicator) -> Any:
        mesh, pipe, optimizer = prepared(comm, model, {"dp": 2, "pp": 2}, schedule=word)
        beside = []
        for rows in (16, 16, 64):
            before = rd.ledger(pipe).entries[comm.rank]
            train(mesh, pipe, optimizer, words_batch(rows))
            entry, steps = rd.ledger(pipe).entries[comm.rank], pipe._roundelay_run.run.steps
            sent = entry.along["pp"] * steps
            sent -= before.along["pp"] * (steps - STEPS) if before.along else 0
            beside.append(sent - STEPS * pipe.record.nbytes)
        book = rd.ledger(pipe)
        assert "kept" in str(book)
        return beside, entry.kept, pipe.peaks[mesh.place["pp"]], pipe.record.nbytes

    for beside, kept, peak, nbytes in rd.run(body, 4, "threads"):
        assert kept == peak
        assert nbytes > 0
        assert beside[1] == pytest.approx(beside[2], abs=400)  # forms, told once for each batch


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("word", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("precision", ["bf16", HALF], ids=["bf16", "fp16"])
def test_half_precision(precision: Any, word: str, strategy: str) -> None:
    model, batch = built(Words).float(), words_batch(16)
    expected, *_ = alone(model, batch)

    def body(comm: rd.Communicator) -> Any:
        mesh, pipe, optimizer = prepared(
            comm, model, {"dp": 2, "pp": 2}, precision=precision, micro_batches=4, schedule=word,
            strategy=strategy,
        )  # fmt: skip
        losses, norms = train(mesh, pipe, optimizer, batch)
        return losses, norms, rd.full_state_dict(pipe), skipped(pipe)

    for losses, norms, state, left_out in rd.run(body, 4, "threads"):
        assert left_out == 0
        assert losses == pytest.approx(expected, rel=2e-2)
        assert norms[0] == pytest.approx(alone(model, batch, 1)[1][0], rel=2e-2)
        assert all(value.dtype == torch.float32 for value in state.values())


def skipped(pipe: Any) -> int:
    return int(pipe._roundelay_run.run.step.skipped)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "ps"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_step_is_skipped_by_all_stages_or_by_none(where: int, strategy: str) -> None:
    """One rank of one stage has a gradient that overflows, in the first of two steps."""
    model, batch = built(Words).float(), words_batch(16)

    def body(comm: rd.Communicator) -> Any:
        mesh, pipe, optimizer = prepared(comm, model, {"dp": 2, "pp": 2}, precision=HALF,
                                         micro_batches=4, strategy=strategy)  # fmt: skip
        before = {name: one.clone() for name, one in rd.full_state_dict(pipe).items()}
        mine = mesh.place == {"dp": 1, "pp": where}
        block = f"blocks.{4 * where + 1}.up.bias"
        hook = pipe.get_parameter(block).register_hook(lambda g: g * float("inf")) if mine else None
        pipe.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        after = rd.full_state_dict(pipe)
        kept = all(torch.equal(before[name], one) for name, one in after.items())
        if hook is not None:
            hook.remove()
        scaler = pipe._roundelay_run.run.setup.scaler
        first = scaler.scale
        train(mesh, pipe, optimizer, batch)
        moved = not torch.equal(before["tokens.weight"], rd.full_state_dict(pipe)["tokens.weight"])
        return kept, moved, skipped(pipe), first, scaler.scale

    results = rd.run(body, 4, "threads")
    assert {result[:3] for result in results} == {(True, True, 1)}
    assert len({result[3:] for result in results}) == 1
