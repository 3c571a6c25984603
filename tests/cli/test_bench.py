"""`roundelay bench`: what it measures is right, whatever it measures, and it says what it can't."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from roundelay.algorithms import algorithms
from roundelay.bench import Case, CaseResult, Spec, Timing, installed_peers, measure
from roundelay.bench.messages import PEERS
from roundelay.bench.peer_mpi import MPIS
from roundelay.bench.tune import candidates, tuned
from roundelay.bench.workload import Workload, bus_factor, least_traffic
from roundelay.collectives import collectives
from roundelay.engines import run_schedule
from roundelay.reductions import REDUCTIONS
from roundelay.tuning import DEFAULT, Tuning, keeps_every_bit, tuning_path

Run = Callable[..., Result]

QUICK = ("-b", "8", "-e", "4KiB", "-f", "512", "--iterations", "2")
COLUMNS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "floor")


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def result_of(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("engine", ["shared_memory", "threads"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_is_measured_and_right(engine: str, size: int) -> None:
    cases = tuple(Case(name, nbytes) for name in collectives.names() for nbytes in (8, 1000))
    spec = Spec(size=size, cases=cases, contenders=("roundelay", "arena"), engine=engine,
                iterations=2, floor=False)  # fmt: skip
    rows = [message for message in measure(spec) if isinstance(message, CaseResult)]
    assert [row.collective for row in rows] == [case.collective for case in cases]
    for row in rows:
        assert set(row.timings) == {"roundelay", "arena"}
        assert all(timing.wrong == 0 and timing.seconds > 0 for timing in row.timings.values())


#: What is measured in one run: a process can hold one MPI only.
TOGETHER = [
    peers
    for peers in (
        tuple(name for name in installed_peers() if name not in MPIS[1:]),
        *((name,) for name in MPIS[1:] if name in installed_peers()),
    )
    if peers
]


def able(peer: str, collective: str) -> bool:
    """Tell what the peers themselves say they have."""
    lacks = {"gloo": ("scan", "exscan")}
    return (
        collective == "all_reduce"
        if peer == "deepspeed"
        else (collective not in lacks.get(peer, ()))
    )


@pytest.mark.skipif(not TOGETHER, reason="no peer is installed (torch; mpi4py and MPI)")
@pytest.mark.parametrize("peers", TOGETHER or [()], ids="-".join)
def test_every_peer_is_measured_in_the_same_run_and_right(peers: tuple[str, ...]) -> None:
    cases = tuple(Case(name, 1000) for name in collectives.names())
    spec = Spec(size=2, cases=cases, contenders=("roundelay", *peers), iterations=2, floor=False)
    rows = [message for message in measure(spec) if isinstance(message, CaseResult)]
    assert [row.collective for row in rows] == collectives.names()
    for row in rows:
        fit = {peer for peer in peers if able(peer, row.collective)}
        assert set(row.timings) == {"roundelay", *fit}
        assert all(timing.wrong == 0 for timing in row.timings.values())


@pytest.mark.parametrize("missing", [peer for peer in PEERS if peer not in installed_peers()]
                         or ["gloo", "mpi"])  # fmt: skip
def test_a_missing_peer_is_an_error_that_names_what_to_install(
    run: Run, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ("torch", "mpi4py")
    for module in ("peer_gloo", "peer_mpi"):
        monkeypatch.setattr(f"roundelay.bench.{module}.find_spec",
                            lambda name: None if name in hidden else find_spec(name))  # fmt: skip
    result = run("bench", *QUICK, "--against", missing)
    assert result.exit_code == 2
    assert "pip install" in result.stderr


def test_the_table_has_the_columns_that_people_know(run: Run) -> None:
    result = run("bench", "-e", "64KiB", "-f", "8192", "--iterations", "2")
    assert result.exit_code == 0
    head = next(line for line in result.stdout.splitlines() if "size" in line)
    assert all(column in head for column in COLUMNS)
    assert "65536" in result.stdout
    assert "%" in result.stdout


def test_the_json_says_what_the_table_says(run: Run) -> None:
    made = result_of(run("bench", "reduce_scatter", "-n", "3", *QUICK, "--json"))
    assert made["config"]["ranks"] == 3
    assert [line["size"] for line in made["results"]] == [12, 4092]
    for line in made["results"]:
        assert line["count"] * 4 == line["size"]
        assert (line["nwrong"], line["redop"], line["root"]) == (0, "sum", -1)
        assert line["bus_bw"] == pytest.approx(line["alg_bw"] * 2 / 3, rel=1e-2)
        assert line["alg_bw"] == pytest.approx(line["size"] / line["time"] / 1e3, rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [("--arena",), ("--algorithm", "ring"), ("--op", "max", "--dtype", "int16"),
     ("--engine", "threads"), ("--op", "avg", "--dtype", "float16"), ("-n", "1")],
)  # fmt: skip
def test_options_change_what_is_measured_and_not_that_it_is_right(
    run: Run, options: tuple[str, ...]
) -> None:
    made = result_of(run("bench", *QUICK, "--json", *options))
    assert [line["nwrong"] for line in made["results"]] == [0, 0]


def test_a_barrier_has_one_row(run: Run) -> None:
    made = result_of(run("bench", "barrier", "--iterations", "2", "--json"))
    assert [line["size"] for line in made["results"]] == [0]


def test_the_plot_is_a_drawing_of_every_row(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert run("bench", *QUICK, "--plot", str(path)).exit_code == 0
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-n", "0"), "-n 0"),
        (("-b", "1MiB", "-e", "8"), "turn them round"),
        (("-f", "1"), "-f 1"),
        (("--iterations", "-1"), "--iterations"),
        (("--op", "maxloc"), "--op maxloc"),
        (("--op", "avg", "--dtype", "int32"), "avg"),
        (("scan", "--op", "avg"), "scan"),
        (("--against", "glo"), "Did you mean 'gloo'"),
        (("--against", "mpi", "--engine", "threads"), "--engine shared_memory"),
        (("--algorithm", "rin"), "ring"),
        (("--algorithm", "ring", "--arena"), "not both"),
        (("--plot", "out.png"), ".svg"),
        (("--plot", "/no/such/folder/out.svg"), "folder"),
        (("all_reduc",), "all_reduce"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    result = run("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", [name for name in collectives.names() if name != "barrier"])
def test_the_oracle_of_the_benchmark_is_the_reference_engine(collective: str, size: int) -> None:
    for op, root in itertools.product(("sum", "max"), range(size)):
        works = [
            Workload.of(collective, 300, rank=rank, size=size, dtype="float32", op=op, root=root)
            for rank in range(size)
        ]
        buffers = [work.make() for work in works]
        name = DEFAULT.choose(collective, 0)
        schedule = algorithms.load(name).schedule(size, root)
        inputs = [each.input[: work.lengths()[0]]
                  for work, each in zip(works, buffers, strict=True)]  # fmt: skip
        made = run_schedule(schedule, inputs, op=op)
        for work, each, output in zip(works, buffers, made, strict=True):
            if isinstance(output, np.ndarray) and output.size:
                each.output[:] = output
                assert work.count_wrong(each) == 0
                each.output[-1] += 1
                assert work.count_wrong(each) == 1


#: Buffers read and written by four ranks together, in units of the largest.
TRAFFIC = {
    "all_gather": 4, "all_reduce": 8, "all_to_all": 7, "broadcast": 4, "exscan": 7, "gather": 1.75,
    "reduce": 5, "reduce_scatter": 5, "scan": 7, "scatter": 1.75,
}  # fmt: skip


@pytest.mark.parametrize("collective", TRAFFIC)
def test_the_least_traffic_is_every_input_and_every_output_but_what_a_rank_keeps(
    collective: str,
) -> None:
    assert least_traffic(collective, 4, 0, 1000) == 1000 * TRAFFIC[collective]
    assert least_traffic(collective, 4, 3, 1000) == 1000 * TRAFFIC[collective]


BUS = {"all_reduce": 1.5, "broadcast": 1, "reduce": 1, "scan": 1, "exscan": 1, "barrier": 1}


@pytest.mark.parametrize("collective", collectives.names())
def test_bus_bandwidth_is_as_nccl_tests_define_it(collective: str) -> None:
    assert bus_factor(collective, 4) == BUS.get(collective, 0.75)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("collective", collectives.names())
def test_the_candidates_keep_every_bit_and_the_default_is_one(collective: str, size: int) -> None:
    found = candidates(collective, size)
    assert all(keeps_every_bit(name, size) for name in found)
    assert {choice.algorithm for choice in DEFAULT.table[collective]} <= set(found)


def timings(**seconds: float) -> dict[str, Timing]:
    return {f"all_reduce_{name}": Timing(s, s, 1, 0) for name, s in seconds.items()}


def test_the_winner_is_chosen_as_far_as_was_measured_and_the_default_beyond() -> None:
    rows = [
        CaseResult(
            "all_reduce", 8, 2, timings(one_shot=1.0, two_shot=0.97), None
        ),  # not clearly faster
        CaseResult("all_reduce", 64, 16, timings(one_shot=1.0, two_shot=0.5), None),
        CaseResult("all_reduce", 1 << 20, 1 << 18, timings(one_shot=0.5, two_shot=1.0), None),
    ]
    made = tuned(rows)
    chosen = {n: made.choose("all_reduce", n).removeprefix("all_reduce_")
              for n in (8, 9, 64, 65, 1 << 20, (1 << 20) + 1)}  # fmt: skip
    assert list(chosen.values()) == ["one_shot", "two_shot", "two_shot", "one_shot", "one_shot",
                                     "two_shot"]  # fmt: skip
    assert made.table["scan"] == DEFAULT.table["scan"]


def test_a_wrong_contender_never_wins() -> None:
    bad = {**timings(one_shot=1.0), "all_reduce_two_shot": Timing(0.1, 0.1, 1, 3)}
    made = tuned([CaseResult("all_reduce", 8, 2, bad, None)])
    assert made.choose("all_reduce", 8) == "all_reduce_one_shot"


def test_tune_writes_the_table_that_later_runs_read(run: Run, tmp_path: Path) -> None:
    path = tuning_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    result = run("bench", "all_reduce", "--tune", "-n", "2", "-e", "8")
    assert result.exit_code == 0, result.stderr
    assert str(path) in result.stderr
    assert result.stdout.startswith("all_reduce: ")
    assert set(Tuning.load(path, size=2).table) == set(collectives.names())
    assert result_of(run("bench", *QUICK, "--json"))["results"][0]["nwrong"] == 0


def test_every_reduction_that_can_be_measured_is_offered(run: Run) -> None:
    result = run("bench", "--op", "summ")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in REDUCTIONS if "loc" not in name)


@pytest.mark.parametrize("columns", [80, 200])
def test_no_figure_is_cut_off_in_a_terminal(terminal: Callable[..., Any], columns: int) -> None:
    shown = terminal("bench", "-b", "1MiB", "-e", "8MiB", "--iterations", "1", columns=columns)
    assert shown.exit_code() == 0
    assert "8388608" in shown.text
    assert ("redop" in shown.text) == (columns > 100)


def test_a_fitted_host_is_a_network_for_all(run: Run, tmp_path: Path) -> None:
    rows = ("-b", "8", "-e", "256KiB", "-f", "32768", "--iterations", "2")
    result = run("bench", "-n", "2", *rows, "--fit")
    assert result.exit_code == 0, result.stderr
    assert "Use it as --network host" in result.stderr
    saved = json.loads((tmp_path / "config/roundelay/networks/host.json").read_text("utf-8"))
    assert saved["per_host"] == 2
    assert saved["bandwidth"] > 0
    small = ("--params", "1e6", "--layers", "4", "--hidden", "128", "--sequence", "64")
    planned = result_of(run("plan", *small, "--gpus", "2", "--network", "host", "--json"))
    assert planned["network"] == "host"
    assert planned["best"]["fits"]
    listed = result_of(run("list", "barrier", "-n", "2", "--network", "host", "--json"))
    assert {row["network"] for row in listed} == {"host"}


@pytest.mark.parametrize("words", [("broadcast",), ("--tune",), ("--arena",)])
def test_a_fit_is_of_all_reduce_as_it_is(run: Run, words: tuple[str, ...]) -> None:
    result = run("bench", *words, "--fit")
    assert result.exit_code == 2
    assert "--fit measures all_reduce as it is" in result.stderr
