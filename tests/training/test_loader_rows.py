"""Whatever the dataset, the sampler and the workers: the batches of one device, every row once."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402

data = torch.utils.data
ROWS = 13
Pair = collections.namedtuple("Pair", ["x", "number"])  # noqa: PYI024 - as users write it


class Numbers(data.Dataset):  # type: ignore[misc, name-defined]
    """Rows that know their number, in the forms that people give them."""

    def __init__(self, form: str = "plain") -> None:
        self.form = form

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        x = torch.tensor([float(row), 1.0], dtype=torch.float64)
        return {
            "plain": x, "tuple": (x, row), "named": Pair(x, row),
            "dict": {"x": x, "deep": {"name": str(row), "number": row}},
        }[self.form]  # fmt: skip


class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
    """Rows one after the other, in another order each epoch; may divide itself between workers."""

    def __init__(self, *, divides: bool = False) -> None:
        self.divides, self.epoch = divides, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = data.get_worker_info()
        rows = [(row * 5 + self.epoch) % ROWS for row in range(ROWS)]
        for row in rows[worker.id :: worker.num_workers] if self.divides and worker else rows:
            yield torch.tensor([float(row), 1.0], dtype=torch.float64)


class Global:
    """A sampler with random numbers of its own, other on every rank, and of no known length."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(ROWS, generator=self.generator)


def numbers(batch: Any) -> list[float]:
    while not isinstance(batch, torch.Tensor):
        batch = batch["x"] if isinstance(batch, dict) else batch[0]
    found: list[float] = batch[:, 0].tolist()
    return found


def epochs(comm: Any, make: Any, options: dict[str, Any]) -> list[list[list[float]]]:
    loader = rd.loader(comm=comm, quiet=True, **make(comm), **options)
    return [[numbers(batch) for batch in loader] for _ in range(2)]


def whole(ranks: list[Any], epoch: int) -> list[list[float]]:
    """The batches of all ranks together."""
    return [
        [row for rank in ranks for row in rank[epoch][at]] for at in range(len(ranks[0][epoch]))
    ]


SOURCES: dict[str, Any] = {
    **{form: lambda _, form=form: {"dataset": Numbers(form)}
       for form in ("plain", "tuple", "named", "dict")},
    "in order": lambda _: {"dataset": Numbers(), "shuffle": False},
    "list": lambda _: {"dataset": [Numbers()[row] for row in range(ROWS)]},
    "stream": lambda _: {"dataset": Stream()},
    "dividing stream": lambda _: {"dataset": Stream(divides=True)},
    "sampler": lambda comm: {"dataset": Numbers(), "sampler": Global(comm.rank)},
    "random sampler": lambda _: {
        "dataset": Numbers(), "sampler": data.RandomSampler(range(ROWS))
    },
    "list of rows": lambda _: {"dataset": Numbers(), "sampler": [*range(ROWS)][::-1]},
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("batch", "drop"), [(1, False), (2, False), (5, False), (5, True), (40, False)]
)
def test_batches_are_those_of_one_device_and_every_row_comes_once(
    source: str,
    batch: int,
    drop: bool,  # noqa: FBT001
) -> None:
    options = {"batch_size": batch, "drop_last": drop}
    alone = rd.run(epochs, 1, "threads", (SOURCES[source], options))[0]
    kept = ROWS // batch * batch if drop else ROWS
    for epoch in range(2):
        rows = [row for one in alone[epoch] for row in one]
        assert len(rows) == len(set(rows)) == kept
        assert all(len(one) == batch for one in alone[epoch][:-1])
    assert (alone[0] == alone[1]) == (
        source in ("in order", "list of rows") or len(alone[0]) > kept
    )
    for size in (2, 3, 4):
        ranks = rd.run(epochs, size, "threads", (SOURCES[source], options))
        assert [whole(ranks, epoch) for epoch in range(2)] == alone
        lengths = {abs(len(one) - len(other)) for rank in ranks for other_rank in ranks
                   for one, other in zip(rank[0], other_rank[0], strict=True)}  # fmt: skip
        assert lengths <= {0, 1}


def test_a_batch_sampler_says_batches_of_any_length() -> None:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], [11, 12]]

    def make(_: Any) -> dict[str, Any]:
        return {"dataset": Numbers(), "batch_sampler": batches}

    for size in (1, 2, 3):
        assert whole(rd.run(epochs, size, "threads", (make, {})), 0) == batches


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
@pytest.mark.parametrize("source", ["dict", "dividing stream", "sampler"])
def test_worker_processes_change_nothing(engine: str, source: str, capfd: Any) -> None:
    options = {"batch_size": 5}
    alone = rd.run(epochs, 1, "threads", (SOURCES[source], options))[0]
    options["num_workers"] = 2
    options["persistent_workers"] = source == "dividing stream"
    ranks = rd.run(epochs, 2, engine, (SOURCES[source], options))
    assert [whole(ranks, epoch) for epoch in range(2)] == alone
    assert "Exception" not in capfd.readouterr().err  # of workers that end those of another rank


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch", [3, 5, 13])
@pytest.mark.parametrize("micro", [None, 1, 2])
def test_the_length_is_what_comes(size: int, batch: int, micro: int | None) -> None:
    def be_rank(comm: Any) -> None:
        model = torch.nn.Linear(2, 1).double()
        model, _ = rd.prepare(model, torch.optim.SGD(model.parameters()), comm=comm)
        for drop in (False, True):
            loader = rd.loader(
                Numbers(), batch, comm=comm, model=model, micro_batch=micro, drop_last=drop,
                quiet=True,
            )  # fmt: skip
            rows = [
                (loader.first_of_step, loader.last_of_step, loader.rows, len(one)) for one in loader
            ]
            assert len(loader) == len(rows)
            assert all(said == found for *_, said, found in rows)
            assert max(found for *_, found in rows) <= (micro or batch)
            assert sum(last for _, last, *_ in rows) == sum(first for first, *_ in rows)
            assert sum(last for _, last, *_ in rows) == (
                ROWS // batch if drop else -(-ROWS // batch)
            )

    rd.run(be_rank, size, "threads")


def test_a_stream_has_no_length() -> None:
    def be_rank(comm: Any) -> None:
        with pytest.raises(TypeError, match="length"):
            len(rd.loader(Stream(), 5, comm=comm, quiet=True))

    rd.run(be_rank, 2, "threads")


# ---- batches of no rows


@pytest.mark.parametrize("form", ["plain", "tuple", "named", "dict"])
def test_a_batch_of_no_rows_has_the_form_of_others(form: str) -> None:
    def be_rank(comm: Any) -> Any:
        return next(iter(rd.loader(Numbers(form), 1, comm=comm, quiet=True, shuffle=False)))

    one, none = rd.run(be_rank, 2, "threads")
    assert type(one) is type(none)
    leaves = list(zip(torch.utils._pytree.tree_leaves(one), _leaves(none), strict=False))
    assert len(leaves) >= 1
    for full, empty in leaves:
        if isinstance(full, torch.Tensor):
            assert (empty.dtype, empty.shape) == (full.dtype, (0, *full.shape[1:]))
    if form == "dict":
        assert none["deep"] == {"name": [], "number": none["deep"]["number"]}


def _leaves(tree: Any) -> Any:
    return torch.utils._pytree.tree_leaves(tree)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (lambda rows: torch.stack(rows, 1), "tensor([], size=(2, 0), dtype=torch.float64)"),
        (list, "[]"),
        (tuple, "()"),
        (lambda rows: {"rows": rows, "mask": torch.ones(2), "k": 3}["rows"], "[]"),
        (lambda rows: (torch.cat(rows), torch.arange(len(rows) + 1)), "(0,) (1,)"),
        (lambda rows: (torch.stack(rows), len(rows)), "can't be made empty"),
        (lambda rows: {1, 2} if rows else rows, "can't be made empty"),
    ],
)  # fmt: skip
def test_what_a_collate_fn_makes_is_emptied_or_refused(collate: Any, expected: str) -> None:
    def be_rank(comm: Any) -> str:
        try:
            batch = next(iter(rd.loader(Numbers(), 1, comm=comm, quiet=True, collate_fn=collate)))
        except InvalidArgumentError as error:
            return str(error)
        if isinstance(batch, tuple) and batch:
            return " ".join(str(tuple(one.shape)) for one in batch if hasattr(one, "shape"))
        return repr(batch)

    assert expected in rd.run(be_rank, 2, "threads")[1]


# ---- what can't be


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dataset": iter([1, 2])}, "IterableDataset"),
        ({"dataset": Stream(), "shuffle": True}, "can't shuffle"),
        ({"dataset": Stream(), "sampler": [1]}, "sampler"),
        ({"dataset": Numbers(), "sampler": [1], "shuffle": True}, "without shuffle"),
        ({"dataset": Numbers(), "batch_sampler": [[1]]}, "leave out batch_size"),
        ({"dataset": Numbers(), "batch_sampler": [[1]], "sampler": [1]}, "batch_sampler alone"),
        ({"dataset": Numbers(), "batch_sampler": [[1]], "batch_size": None, "drop_last": True},
         "drop_last"),
        ({"dataset": Numbers(), "sampler": data.DistributedSampler(Numbers(), 2, 0)}, "twice"),
        ({"dataset": Numbers(), "in_order": False}, "in_order"),
        ({"dataset": []}, "no rows"),
        ({"dataset": Numbers(), "seed": -1}, "seed"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_named(options: dict[str, Any], word: str) -> None:
    def be_rank(comm: Any) -> str:
        with pytest.raises(InvalidArgumentError) as error:
            rd.loader(**{"batch_size": 4, **options}, comm=comm, quiet=True)
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert word in told
        assert told.startswith("loader")


@pytest.mark.parametrize("option", [{"batch_size": 3}, {"seed": 5}, {"dataset": [1, 2]}])
def test_ranks_that_differ_are_told(option: dict[str, Any]) -> None:
    def be_rank(comm: Any) -> None:
        given = {"dataset": Numbers(), "batch_size": 4, **(option if comm.rank == 1 else {})}
        with pytest.raises(CollectiveMismatch, match="same dataset and options"):
            rd.loader(**given, comm=comm, quiet=True)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("fault", ["raises", "gives no rows", "gives what can't be sent"])
def test_a_sampler_that_fails_is_named_on_all_ranks(fault: str) -> None:
    class Failing:
        def __iter__(self) -> Iterator[Any]:
            yield [0, 1, 2, 3]
            if fault == "raises":
                raise LookupError(fault)
            yield [] if fault == "gives no rows" else [object()]

    def be_rank(comm: Any) -> Any:
        loader = rd.loader(Numbers(), comm=comm, quiet=True, batch_sampler=Failing())
        errors = LookupError, InvalidArgumentError
        with pytest.raises(errors if comm.rank == 0 else CollectiveMismatch) as error:
            list(loader)
        assert comm.rank == 0 or "the sampler failed on rank 0" in str(error.value)
        return comm.all_reduce(torch.ones(1)).item()  # nobody is left behind

    assert rd.run(be_rank, 3, "threads") == [3.0] * 3


# ---- going on


class Own:
    """A sampler that says by itself where an epoch begins."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from ((row * 5 + self.epoch) % ROWS for row in range(ROWS))


@pytest.mark.parametrize("source", [*(one for one in SOURCES if one != "sampler"), "own sampler"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_loader_goes_on_in_the_middle_of_an_epoch_on_other_ranks(
    source: str, before: int, after: int
) -> None:
    own = {"own sampler": lambda _: {"dataset": Numbers(), "sampler": Own()}}
    make = {**SOURCES, **own}[source]

    def begin(comm: Any) -> Any:
        loader = rd.loader(batch_size=3, comm=comm, quiet=True, **make(comm))
        list(loader)
        for number, _ in enumerate(loader):
            if number == 1:
                return loader.state_dict()
        return None

    def finish(comm: Any, state: Any) -> Any:
        loader = rd.loader(batch_size=3, comm=comm, quiet=True, **make(comm))
        loader.load_state_dict(state)
        return [[numbers(one) for one in loader] for _ in range(2)]

    def through(comm: Any) -> Any:
        loader = rd.loader(batch_size=3, comm=comm, quiet=True, **make(comm))
        return [[numbers(one) for one in loader] for _ in range(3)]

    states = rd.run(begin, before, "threads")
    assert all(one == states[0] for one in states)
    ranks = rd.run(finish, after, "threads", (states[0],))
    due = rd.run(through, 1, "threads")[0]
    assert [whole(ranks, 0), whole(ranks, 1)] == [due[1][2:], due[2]]


def test_a_state_between_epochs_and_one_that_was_set_are_good() -> None:
    def be_rank(comm: Any) -> None:
        def make() -> Any:
            return rd.loader(Numbers(), 3, comm=comm, quiet=True)

        def rest(state: Any) -> list[list[float]]:
            again = make()
            again.load_state_dict(state)
            assert again.state_dict() == state
            return [numbers(one) for one in again]

        loader = make()
        assert rest(loader.state_dict()) == [numbers(one) for one in loader]
        state = loader.state_dict()
        second = [numbers(one) for one in loader]
        assert rest(state) == second
        loader.done, loader.epoch = 2, 1
        assert rest(loader.state_dict()) == second[2:]
        for _ in loader:
            break
        loader.epoch = 1  # after a loop that was left, from its beginning
        assert rest(loader.state_dict()) == second
        with pytest.raises(InvalidArgumentError, match="no state of a loader"):
            loader.load_state_dict({"epoch": 1})

    rd.run(be_rank, 2, "threads")


def test_going_on_with_other_rows_is_refused() -> None:
    def be_rank(comm: Any) -> None:
        def make(**options: Any) -> Any:
            given = {"dataset": Numbers(), "batch_size": 3, **options}
            return rd.loader(**given, comm=comm, quiet=True)

        loader = make(sampler=Global(1))
        for _ in loader:
            break
        again = make(sampler=Global(2))
        again.load_state_dict(loader.state_dict())
        with pytest.raises(InvalidArgumentError, match="sampler draws other rows"):
            list(again)
        for changed in ({"batch_size": 4}, {"shuffle": False}, {"drop_last": True}):
            with pytest.raises(InvalidArgumentError, match=next(iter(changed))):
                make(**changed).load_state_dict(make().state_dict())

    rd.run(be_rank, 2, "threads")


def test_loops_at_the_same_time_do_not_disturb_one_another() -> None:
    def be_rank(comm: Any) -> None:
        loader = rd.loader(Numbers(), 3, comm=comm, quiet=True)
        due = [[numbers(one) for one in loader] for _ in range(4)]
        loader.set_epoch(0)
        pairs = [(numbers(one), numbers(other)) for one, other in zip(loader, loader, strict=True)]
        assert [one for one, _ in pairs] == due[0]
        assert [other for _, other in pairs] == due[1]
        first, second = iter(loader), iter(loader)
        assert numbers(next(first)) == due[2][0]
        assert [numbers(one) for one in second] == due[3]
        assert [numbers(one) for one in first] == due[2][1:]
        assert loader.epoch == 4

    rd.run(be_rank, 2, "threads")
