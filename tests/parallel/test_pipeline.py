"""A pipeline trains as one device does: every schedule, every number of ranks, every way to cut."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

import roundelay as rd
from roundelay.pipelines import (
    PipelineSchedule,
    pipeline_called,
    pipelines,
    prove_pipeline,
    save_pipeline,
)

torch = pytest.importorskip("torch")
nn = torch.nn

#: Thread ranks share torch's random numbers.
_building = threading.Lock()
WORDS = [maker.word for maker in pipelines]
ROWS = 24
EXACT = 1e-12


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """A way around, and something to branch off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):  # type: ignore[misc, name-defined]
    """Embeddings that the head shares, a parameter of its own, and a list of blocks."""

    def __init__(self, blocks: int = 8, width: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.shift = nn.Parameter(torch.full((width,), 0.25))
        self.register_buffer("scale", torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def words_loss(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output, target)


def square_loss(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def sequence(layers: int = 16, width: int = 6) -> Any:
    parts = [part for _ in range(layers // 2) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts, nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3)))


def built(make: Any) -> Any:
    """The same weights every time."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make().double()


def words_batch(rows: int = ROWS) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, 11, (rows,), generator=generator),
        torch.randint(0, 11, (rows,), generator=generator),
    )


def number_batch(rows: int = ROWS, width: int = 6) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    return x, torch.randn(rows, 3, dtype=torch.float64, generator=generator)


def alone(model: Any, loss: Any, batch: tuple[Any, Any], steps: int) -> tuple[list[float], Any]:
    """Train one device; return its losses and the model with its last gradients."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model


def check_alike(parts: list[Any], whole: Any) -> None:
    """Compare parameters and gradients of all ranks with the whole model's, by their names."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    seen: dict[str, Any] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            other = expected[name]
            for mine, theirs in ((parameter, other), (parameter.grad, other.grad)):
                assert (mine is None) == (theirs is None), name
                if mine is not None:
                    scale = max(float(theirs.detach().abs().max()), 1e-3)
                    assert float((mine - theirs).detach().abs().max()) <= EXACT * scale, name
            seen[name] = parameter.detach()
    assert seen.keys() == expected.keys()
    if "head.weight" in seen:  # copies are equal to the last bit
        assert torch.equal(seen["head.weight"], seen["tokens.weight"])


def trained(
    size: int, model: Any, loss: Any, batch: tuple[Any, Any], steps: int = 2, **options: Any
) -> list[Any]:
    """Train a pipeline; return each rank's, with its losses."""

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=loss, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(pipe.step(*batch).item())
            optimizer.step()
        assert pipe.record.peak == pipe.peaks[comm.rank]
        return losses, pipe

    return rd.run(body, size, "threads")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("word", WORDS)
def test_trains_as_one_device_does(word: str, size: int) -> None:
    rounds = {3: 12, 8: 24}.get(size, 8)
    for make, loss, batch in (
        (lambda: Words(16), words_loss, words_batch(48)),
        (lambda: sequence(32), square_loss, number_batch(48)),
    ):
        model = built(make)
        losses, whole = alone(model, loss, batch, 2)
        count = rounds if pipeline_called(word).multiple else 6
        results = trained(size, model, loss, batch, schedule=word, micro_batches=count)
        for mine, _ in results:
            assert mine == pytest.approx(losses, rel=EXACT)
        check_alike([pipe for _, pipe in results], whole)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("word", ["gpipe", "1f1b", "zb-h1"])
def test_fewer_micro_batches_than_ranks(word: str, micro_batches: int) -> None:
    model, batch = built(Words), words_batch(10)
    losses, whole = alone(model, words_loss, batch, 2)
    results = trained(4, model, words_loss, batch, schedule=word, micro_batches=micro_batches)
    assert results[2][0] == pytest.approx(losses, rel=EXACT)
    check_alike([pipe for _, pipe in results], whole)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"stages": ["blocks.1", "blocks.6"]}),
        (3, {"stages": ["tokens", "blocks.1", "norm"]}),
        (2, {"stages": ["blocks.3.down"]}),  # in the middle of a block, with a way around
        (3, {"stages": ["blocks.3.up", "blocks.3.down"], "schedule": "zb-h1"}),
        (2, {"stages": ["blocks.2", "blocks.4", "norm"], "schedule": "interleaved-1f1b",
             "micro_batches": 6}),
        (2, {"schedule": "interleaved-1f1b", "stages_per_rank": 3}),
        (2, {"cost": "time", "sample": torch.arange(8)}),
    ],
)  # fmt: skip
def test_stages_where_they_are_said_to_start(size: int, options: dict[str, Any]) -> None:
    model, batch = built(Words), words_batch()
    losses, whole = alone(model, words_loss, batch, 2)
    results = trained(size, model, words_loss, batch, **options)
    assert results[0][0] == pytest.approx(losses, rel=EXACT)
    check_alike([pipe for _, pipe in results], whole)


class Odd(nn.Module):  # type: ignore[misc, name-defined]
    """Decides by its data, as no chain does, and has several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)
        self.third = nn.Linear(4, 3)

    def begin(self, x: Any, y: Any) -> Any:
        x = self.first(x) if bool(x.sum() < 1e9) else x
        return x, torch.sigmoid(y)

    def end(self, x: Any, gate: Any) -> Any:
        return self.third(torch.relu(self.second(x)) * gate[:, :1])

    def forward(self, x: Any, y: Any) -> Any:
        return self.end(*self.begin(x, y))


class Begin(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.first = model.first

    def forward(self, x: Any, y: Any) -> Any:
        return Odd.begin(self, x, y)


class End(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.second, self.third = model.second, model.third

    def forward(self, x: Any, gate: Any) -> Any:
        return Odd.end(self, x, gate)


def test_a_function_that_splits() -> None:
    model, (x, target) = built(Odd), number_batch()
    whole = copy.deepcopy(model)
    loss = square_loss(whole(x, x), target)
    loss.backward()

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=square_loss,
                           split=lambda model: [Begin(model), End(model)])  # fmt: skip
        return pipe.step((x, x), target).item(), pipe

    results = rd.run(body, 2, "threads")
    assert results[0][0] == pytest.approx(loss.item(), rel=EXACT)
    check_alike([pipe for _, pipe in results], whole)


def test_each_rank_holds_its_stages_alone() -> None:
    model = built(Words)

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, stages=["blocks.4"], loss=words_loss)
        assert f"stage {comm.rank} of 2" in repr(pipe)
        return dict(pipe.state_dict())

    first, second = rd.run(body, 2, "threads")
    whole = dict(model.state_dict())
    assert first.keys() | second.keys() == whole.keys()
    assert first.keys() & second.keys() == set()
    assert "scale" in first
    assert "blocks.4.up.weight" in second
    assert {**first, **second}.keys() == whole.keys()
    assert all(torch.equal(whole[name], value) for name, value in {**first, **second}.items())


@pytest.mark.parametrize("word", WORDS)
def test_messages_and_bytes_are_those_of_the_formula(word: str) -> None:
    model, batch, size, micro_batches = built(sequence), number_batch(), 4, 8
    schedule = pipeline_called(word)(size, micro_batches)

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=square_loss, schedule=schedule)
        pipe.step(*batch)  # tells forms
        before = comm.traffic()
        pipe.step(*batch)
        after = comm.traffic()
        assert before is not None
        assert after is not None
        sent = [new.sent - old.sent for old, new in zip(before, after, strict=True)]
        return pipe.record, sent[comm.rank]

    results = rd.run(body, size, "threads")
    each = ROWS // micro_batches * 6 * 8  # bytes of a micro-batch's activation
    for rank, (record, _) in enumerate(results):
        stages = schedule.stages_of(rank)
        ends = sum(stage + 1 < schedule.stages for stage in stages) + sum(map(bool, stages))
        assert record.messages == ends * micro_batches
        assert record.nbytes == ends * micro_batches * each
        assert record.peak == prove_pipeline(schedule).peaks[rank]
    total = sum(record.messages for record, _ in results)
    assert total == 2 * (schedule.stages - 1) * micro_batches


def test_a_schedule_of_your_own(tmp_path: Any) -> None:
    """Two stages on the first rank, one on the second, written by hand into a file."""
    one = pipeline_called("gpipe")(1, 4).ranks[0]
    first = [action._replace(stage=stage) for stage in (0, 1) for action in one[:4]]
    first += [action._replace(stage=stage) for stage in (1, 0) for action in one[4:]]
    own = PipelineSchedule(
        [first, [action._replace(stage=2) for action in one]], 4, placement=[0, 0, 1], name="mine"
    )
    path = tmp_path / "mine.json"
    save_pipeline(own, path)
    model, batch = built(Words), words_batch()
    losses, whole = alone(model, words_loss, batch, 2)
    for schedule in (own, path, str(path)):
        results = trained(2, model, words_loss, batch, schedule=schedule)
        assert results[1][0] == pytest.approx(losses, rel=EXACT)
        check_alike([pipe for _, pipe in results], whole)


def test_evaluation_needs_no_gradient_and_takes_any_rows() -> None:
    model, batch = built(Words), words_batch()

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=words_loss, schedule="interleaved-1f1b")
        pipe.eval()
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        outputs = [pipe(batch[0][:rows]) for rows in (24, 7)]
        outputs.append(pipe(batch[0] if first else None))
        loss = pipe.evaluate(batch[0] if first else None, batch[1] if last else None)
        odd = pipe.evaluate(batch[0][:5], batch[1][:5])
        assert all(parameter.grad is None for parameter in pipe.parameters())
        return outputs, loss.item(), odd.item()

    results = rd.run(body, 2, "threads")
    with torch.no_grad():
        expected = [model(batch[0]), model(batch[0][:7]), model(batch[0])]
    assert results[0][0] == [None] * 3
    for output, due in zip(results[1][0], expected, strict=True):
        assert not output.requires_grad
        assert float((output - due).abs().max()) < EXACT
    for _, loss, odd in results:
        assert loss == pytest.approx(words_loss(expected[0], batch[1]).item(), rel=EXACT)
        assert odd == pytest.approx(words_loss(model(batch[0][:5]), batch[1][:5]).item(), rel=EXACT)


def test_shapes_may_change_from_step_to_step() -> None:
    model = built(Words)
    batches = [words_batch(24), words_batch(8), words_batch(24)]
    whole = copy.deepcopy(model)
    for x, target in batches:
        words_loss(whole(x), target).backward()

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=words_loss)
        for x, target in batches:  # gradients add up
            pipe.step(x, target)
        return pipe

    check_alike(rd.run(body, 3, "threads"), whole)


@pytest.mark.parametrize("word", WORDS)
def test_frozen_stages_and_frozen_parameters(word: str) -> None:
    model, batch = built(sequence), number_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("0.", "2.", "6.", "8.bias")))
    losses, whole = alone(model, square_loss, batch, 2)
    results = trained(2, model, square_loss, batch, schedule=word)
    assert results[0][0] == pytest.approx(losses, rel=EXACT)
    check_alike([pipe for _, pipe in results], whole)


def test_dropout_differs_between_micro_batches_and_not_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    x, target = number_batch()

    def body(comm: rd.Communicator) -> Any:
        with _building:
            mine = copy.deepcopy(model)
        pipe = rd.Pipeline(mine, comm=comm, loss=square_loss, stages=["2"], micro_batches=4)
        losses = [pipe.step(x, target).item() for _ in range(3)]
        pipe.eval()
        return losses, [pipe.evaluate(x, target).item() for _ in range(2)]

    for losses, same in rd.run(body, 2, "threads"):
        assert len(set(losses)) == 3
        assert same[0] == same[1]
