"""What a pipeline can't do is told on all ranks, by name; an error of one stage reaches all."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import (
    CollectiveMismatch,
    InvalidArgumentError,
    ProofError,
    RankFailed,
    ScheduleError,
    UnknownNameError,
)
from roundelay.pipelines import PipelineSchedule, pipeline_called, pipelines

torch = pytest.importorskip("torch")
nn = torch.nn

_building = threading.Lock()


def loss(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def model_of(layers: int = 6) -> Any:
    with _building:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def refused(size: int, body: Any) -> list[BaseException]:
    """Return what each rank raises."""

    def rank_of(comm: rd.Communicator) -> BaseException:
        comm.timeout = 20
        with pytest.raises(Exception) as caught:
            body(comm)
        return caught.value

    return rd.run(rank_of, size, "threads")


class Branches(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.one(x) if x.sum() > 0 else self.other(x)


class Modal(Branches):
    def forward(self, x: Any) -> Any:
        return self.other(nn.functional.dropout(self.one(x), 0.5, self.training))


class Sizes(Branches):
    def forward(self, x: Any) -> Any:
        rows = x.shape[0]
        return self.other(self.one(x)).view(rows, 4)


class Unused(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.other(self.one(x))


class Step(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.step, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.other(self.step(x))


CASES: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (model_of, {"stages": ["7"]}, UnknownNameError, "'7'"),
    (model_of, {"stages": ["4", "2"]}, InvalidArgumentError, "another order: 2, 4"),
    (model_of, {"stages": ["2"]}, InvalidArgumentError, "3 stages on 3 ranks"),
    (model_of, {"stages": "2"}, InvalidArgumentError, "lists names"),
    (model_of, {"schedule": "1f2b"}, UnknownNameError, "Did you mean '1f1b'"),
    (model_of, {"schedule": "interleaved-1f1b", "micro_batches": 4}, InvalidArgumentError,
     "micro_batches=6"),
    (model_of, {"schedule": "interleaved-1f1b", "micro_batches": 6, "stages": ["1", "2", "4"]},
     InvalidArgumentError, "same number of stages"),
    (model_of, {"schedule": "nowhere.json"}, ScheduleError, "nowhere.json"),
    (model_of, {"schedule": pipeline_called("1f1b")(2, 8)}, InvalidArgumentError, "2 ranks"),
    (model_of, {"schedule": pipeline_called("1f1b")(3, 8), "micro_batches": 4},
     InvalidArgumentError, "has 8 micro-batches"),
    (model_of, {"schedule": PipelineSchedule([[], [], []], 1)}, ProofError, "missing"),
    (model_of, {"micro_batches": 0}, InvalidArgumentError, "micro_batches"),
    (model_of, {"stages_per_rank": 2}, InvalidArgumentError, "one stage on every rank"),
    (model_of, {"cost": "money"}, InvalidArgumentError, "parameters, time"),
    (model_of, {"cost": "time"}, InvalidArgumentError, "sample="),
    (model_of, {"split": lambda model: [model[:2], model[2:4], nn.Linear(4, 4)]},
     InvalidArgumentError, "does not have"),
    (model_of, {"split": lambda model: model}, InvalidArgumentError, "returned Sequential"),
    (model_of, {"split": lambda model: [model], "stages": ["2"]}, InvalidArgumentError, "not both"),
    (lambda: model_of(2), {}, InvalidArgumentError, "needs 3 stages that have parameters"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), {"stages": ["1", "2"]},
     InvalidArgumentError, "Stage 1 of the pipeline has no parameters: it has 1"),
    (Branches, {}, InvalidArgumentError, "Branches: its forward is no chain"),
    (Modal, {}, InvalidArgumentError, "one thing in training"),
    (Unused, {"stages": ["other"]}, InvalidArgumentError, "never.weight is in no stage"),
    (Step, {"stages": ["other"]}, InvalidArgumentError, "'step' itself"),
    (lambda: "model", {}, InvalidArgumentError, "torch.nn.Module"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "kind", "said"), CASES)
def test_what_can_not_be_is_refused_on_all_ranks(
    make: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    size = 2 if make in (Unused, Step) else 3

    def body(comm: rd.Communicator) -> None:
        rd.Pipeline(make(), comm=comm, loss=loss, **options)

    for error in refused(size, body):
        assert isinstance(error, kind), error
        assert said in str(error)


def test_no_communicator_and_hooks() -> None:
    with pytest.raises(InvalidArgumentError, match="comm="):
        rd.Pipeline(model_of(), comm=None, loss=loss)  # type: ignore[arg-type]

    def body(comm: rd.Communicator) -> None:
        model = model_of()
        model.register_forward_hook(lambda *_: None)
        rd.Pipeline(model, comm=comm, loss=loss)

    assert all("hooks" in str(error) for error in refused(2, body))


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"micro_batches": 4}, "micro_batches is"),
        ({"schedule": "gpipe"}, "the schedule is"),
        ({"stages": ["1"]}, "the cut is"),
        ({"schedule": "1f2b"}, "1f2b"),
    ],
)
def test_ranks_that_differ_are_told(mine: dict[str, Any], said: str) -> None:
    def body(comm: rd.Communicator) -> None:
        rd.Pipeline(model_of(), comm=comm, loss=loss, **(mine if comm.rank else {}))

    for error in refused(2, body):
        assert isinstance(error, (CollectiveMismatch, UnknownNameError))
        assert said in str(error)

    def other_model(comm: rd.Communicator) -> None:
        rd.Pipeline(model_of(6 + comm.rank), comm=comm, loss=loss, stages=["2"])

    assert all(isinstance(error, CollectiveMismatch) for error in refused(2, other_model))


@pytest.mark.parametrize(
    ("mine", "said"), [({"micro_batches": 4}, "micro_batches: 4"), ({"schedule": "gpipe"}, "gpipe")]
)
def test_replicas_that_differ_are_told(mine: dict[str, Any], said: str) -> None:
    """Each pipeline is right by itself; prepare compares them."""

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(dp=2, pp=2, comm=comm)
        options = mine if mesh.place["dp"] else {}
        pipe = rd.Pipeline(model_of(), comm=mesh["pp"], loss=loss, **options)
        rd.prepare(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), mesh=mesh)

    for error in refused(4, body):
        assert isinstance(error, CollectiveMismatch), error
        assert said in str(error)


def steps(comm: rd.Communicator, *batches: Any, **options: Any) -> Any:
    """Make a pipeline, and have it refuse each of these batches but not the next one."""
    pipe = rd.Pipeline(model_of(), comm=comm, loss=loss, **options)
    for x, target in batches:
        pipe.step(x, target)
    return pipe


@pytest.mark.parametrize(
    ("x", "target", "said"),
    [
        (torch.ones(7, 4), torch.ones(7, 4), "7 rows does not divide into 8"),
        (torch.ones(8, 4), torch.ones(16, 4), "rows"),
        (torch.ones(()), torch.ones(8, 4), "number of rows"),
        ((torch.ones(8, 4), torch.ones(4, 4)), torch.ones(8, 4), "number of rows"),
        ((torch.ones(8, 4), torch.ones(8, 4)), torch.ones(8, 4), "takes input, and x has 2"),
        (None, torch.ones(8, 4), "first stage needs a batch"),
        (torch.ones(8, 4), None, "last stage needs a target"),
        (torch.ones(8, 4), "target", "number of rows"),
    ],
)
def test_batches_that_do_not_fit(x: Any, target: Any, said: str) -> None:
    for error in refused(3, lambda comm: steps(comm, (x, target))):
        assert said in str(error)


def test_batches_that_differ_between_ranks() -> None:
    def other_shapes(comm: rd.Communicator) -> None:
        steps(comm, (torch.ones(8 + 8 * comm.rank, 4), torch.ones(8 + 8 * comm.rank, 4)))

    assert all("other shapes" in str(error) for error in refused(2, other_shapes))

    def other_call(comm: rd.Communicator) -> None:
        pipe = rd.Pipeline(model_of(), comm=comm, loss=loss)
        batch = torch.ones(8, 4), torch.ones(8, 4)
        (pipe.step if comm.rank else pipe.evaluate)(*batch)

    assert all("does not do what rank 0 does" in str(error) for error in refused(2, other_call))

    def uneven(comm: rd.Communicator) -> None:
        rows = 7 if comm.rank else 8
        steps(comm, (torch.ones(rows, 4), torch.ones(rows, 4)))

    kinds = [type(error) for error in refused(2, uneven)]
    assert kinds == [CollectiveMismatch, InvalidArgumentError]


def test_no_loss_and_a_loss_that_is_none() -> None:
    def without(comm: rd.Communicator) -> None:
        rd.Pipeline(model_of(), comm=comm).step(torch.ones(8, 4), torch.ones(8, 4))

    assert all("has no loss" in str(error) for error in refused(2, without))

    def rows(comm: rd.Communicator) -> None:
        pipe = rd.Pipeline(model_of(), comm=comm, loss=lambda output, _: output)
        pipe.step(torch.ones(8, 4), torch.ones(8, 4))

    errors = refused(2, rows)
    assert [type(error) for error in errors] == [RankFailed, InvalidArgumentError]
    assert all("one number" in str(error) for error in errors)


def test_what_is_no_tensor_does_not_go_from_stage_to_stage() -> None:
    def body(comm: rd.Communicator) -> None:
        with _building:
            model = Sizes()
        rd.Pipeline(model, comm=comm, loss=loss, stages=["other"]).step(
            torch.ones(8, 4), torch.ones(8, 4)
        )

    errors = refused(2, body)
    assert [type(error) for error in errors] == [InvalidArgumentError, RankFailed]
    assert all("hands on int" in str(error) for error in errors)


class Fails(nn.Module):  # type: ignore[misc, name-defined]
    """Raises in the n-th of its calls, forward or backward."""

    def __init__(self, when: int, *, back: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.when, self.back, self.calls = when, back, 0

    def count(self, grad: Any = None) -> None:
        del grad
        self.calls += 1
        if self.calls == self.when:
            raise ZeroDivisionError("no such luck")

    def forward(self, x: Any) -> Any:
        x = self.linear(x)
        if not self.back:
            self.count()
        elif torch.is_grad_enabled():
            x.register_hook(self.count)
        return x


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("when", [1, 2, 8, 11])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("word", [maker.word for maker in pipelines])
def test_an_error_in_one_stage_reaches_all_ranks_and_they_go_on(
    word: str, place: int, when: int, *, back: bool
) -> None:
    """In the first step, when forms are not known yet, or in the second; then a third is right."""
    with _building:
        layers = [nn.Linear(4, 4) for _ in range(6)]
        layers[2 * place] = Fails(when, back=back)
        model = nn.Sequential(*layers).double()
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 24
    whole = copy.deepcopy(model)
    whole[2 * place].when = 0
    expected = loss(whole(x), x)
    expected.backward()

    def body(comm: rd.Communicator) -> Any:
        comm.timeout = 30
        with _building:
            mine = copy.deepcopy(model)
        starts = [str(2 * stage) for stage in range(3)]
        if word == "interleaved-1f1b":
            starts = [str(stage) for stage in range(6)]
        pipe = rd.Pipeline(mine, comm=comm, loss=loss, stages=starts, schedule=word,
                           micro_batches=6)  # fmt: skip
        errors: list[Any] = []
        for _ in range(3):
            pipe.zero_grad()
            try:
                last = pipe.step(x, x).item()
            except (ZeroDivisionError, RankFailed) as error:
                errors.append(error)
        return errors, last, {name: each.grad for name, each in pipe.named_parameters()}

    results = rd.run(body, 3, "threads")
    owner = pipeline_called(word)(3, 6).placement[
        2 * place if word == "interleaved-1f1b" else place
    ]
    for rank, (errors, last, grads) in enumerate(results):
        assert [type(error) for error in errors] == [
            ZeroDivisionError if rank == owner else RankFailed
        ]
        assert "no such luck" in str(errors[0])
        assert last == pytest.approx(expected.item(), rel=1e-12)
        for name, grad in grads.items():
            assert torch.allclose(grad, whole.get_parameter(name).grad, rtol=1e-12)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("inside", [False, True])
def test_copies_are_refused_by_name(how: Any, *, inside: bool) -> None:
    """They would run the modules that this pipeline was cut out of."""

    def body(comm: Any) -> str:
        layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        pipe = rd.Pipeline(torch.nn.Sequential(*layers), comm=comm)
        with pytest.raises(InvalidArgumentError) as caught:
            how({"model": pipe} if inside and how is not copy.copy else pipe)
        return str(caught.value)

    assert all("make another rd.Pipeline" in told for told in rd.run(body, 2, "threads"))
