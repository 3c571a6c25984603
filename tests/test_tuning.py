"""A tuning table changes how fast results come, never what they are; a bad one changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import FormatError, InvalidArgumentError
from roundelay.schedule import prove
from roundelay.tuning import (
    DEFAULT,
    Choice,
    Tuning,
    default_for,
    host_tuning,
    keeps_every_bit,
    rounds_once,
    tuning_path,
)

SIZES = (1, 2, 3, 4, 7, 8)


def write(path: Path, table: object, *, ranks: int = 2, **other: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"format": "roundelay-tuning", "version": 1, "ranks": {str(ranks): table}, **other}
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize("collective", collectives.names())
def test_the_defaults_cover_every_collective_and_every_number_of_bytes(collective: str) -> None:
    choices = DEFAULT.table[collective]
    assert choices[-1].up_to == math.inf
    for nbytes in (0, 1, 32 * 1024, 32 * 1024 + 1, 1 << 40):
        chosen = algorithms.load(DEFAULT.choose(collective, nbytes))
        assert chosen.collective.name == collective


@pytest.mark.parametrize("cores", [0, 16])
@pytest.mark.parametrize("size", (*SIZES, 16))
@pytest.mark.parametrize("collective", collectives.names())
def test_every_default_keeps_every_bit(collective: str, size: int, cores: int) -> None:
    for table in (DEFAULT.table, default_for(size, cores=cores).table):
        assert all(keeps_every_bit(choice.algorithm, size) for choice in table[collective])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [a.name for a in algorithms if a.collective.reduces])
def test_what_the_proof_says_decides(name: str, size: int) -> None:
    algorithm = algorithms.load(name)
    proof = prove(algorithm.schedule(size))
    any_order = algorithm.collective.idempotent
    assert keeps_every_bit(name, size) == (any_order or proof.order == "rank_order")
    assert rounds_once(name, size) == (any_order or proof.folds <= 1)


def test_pipelines_are_for_ranks_that_have_a_core() -> None:
    for size, cores, due in ((8, 16, True), (16, 16, True), (8, 7, False), (8, 0, False)):
        chosen = default_for(size, cores=cores).choose("scan", 1 << 20)
        assert (chosen == "scan_pipeline") == due


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_several_folds_are_not_for_halves(
    collective: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: rd.Communicator) -> list[bytes]:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        numbers = np.random.default_rng(comm.rank).standard_normal(10_000) * 100
        return [
            getattr(comm, collective)(numbers.astype(kind), algorithm=name).tobytes()
            for name in (None, "direct")
        ]

    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    write(tuning_path(environment), {collective: [{"algorithm": f"{collective}_pipeline"}]})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for size in (2, 5):
        found = rd.run(work, size, engine="threads")
        assert all(chosen == direct for chosen, direct in found)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, size: int) -> None:
    path = tmp_path / "deep" / "tuning.json"
    made = Tuning({
        **DEFAULT.table,
        "all_reduce": (Choice(100, "all_reduce_parameter_server"),
                       Choice(math.inf, "all_reduce_two_shot")),
        "all_gather": (Choice(math.inf, "all_gather_ring"),),
    })  # fmt: skip
    made.save(path, size=size)
    assert Tuning.load(path, size=size) == made
    assert Tuning.load(path, size=size).choose("all_reduce", 100) == "all_reduce_parameter_server"
    assert Tuning.load(path, size=size).choose("all_reduce", 101) == "all_reduce_two_shot"
    assert [each.name for each in path.parent.iterdir()] == ["tuning.json"]


def test_every_number_of_ranks_has_its_own_table_and_the_nearest_below_counts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tuning.json"
    for size, name in ((2, "all_gather_ring"), (4, "all_gather_bruck")):
        Tuning({"all_gather": (Choice(math.inf, name),)}).save(path, size=size)
    found = {size: Tuning.load(path, size=size).choose("all_gather", 8) for size in range(1, 7)}
    assert found == {
        1: "all_gather_direct",
        **dict.fromkeys((2, 3), "all_gather_ring"),
        **dict.fromkeys((4, 5, 6), "all_gather_bruck"),
    }


BAD = {
    "no JSON": "{",
    "not UTF-8": b"\xff\xfe",
    "a list": [],
    "another format": {"format": "x", "version": 1, "ranks": {}},
    "a later version": {"format": "roundelay-tuning", "version": 2, "ranks": {}},
    "an unknown key": {"format": "roundelay-tuning", "version": 1, "ranks": {}, "x": 1},
    "too long": b" " * (1 << 21),
    "too deep": "[" * 100_000,
}
BAD_TABLES = {
    "no such collective": {"all_reduc": [{"algorithm": "all_reduce_two_shot"}]},
    "no such algorithm": {"all_reduce": [{"algorithm": "all_reduce_magic"}]},
    "of another collective": {"all_reduce": [{"algorithm": "all_gather_ring"}]},
    "another order of addition": {"all_reduce": [{"algorithm": "all_reduce_ring"}]},
    "no lines": {"all_reduce": []},
    "an end": {"all_reduce": [{"algorithm": "all_reduce_two_shot", "up_to": 8}]},
    "falling": {"all_gather": [{"algorithm": "all_gather_ring", "up_to": 9},
                               {"algorithm": "all_gather_ring", "up_to": 8},
                               {"algorithm": "all_gather_ring"}]},
    "below zero": {"all_gather": [{"algorithm": "all_gather_ring", "up_to": -1},
                                  {"algorithm": "all_gather_ring"}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named_and_the_defaults_are_used(kind: str, tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = tuning_path(environment)
    path.parent.mkdir()
    given = BAD[kind]
    data = given if isinstance(given, (str, bytes)) else json.dumps(given)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(FormatError, match=r"tuning\.json"):
        Tuning.load(path, size=4)
    with pytest.warns(UserWarning, match=f"{path}.*roundelay bench --tune"):
        assert host_tuning(4, environment) == default_for(4)


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table_is_named_and_the_defaults_are_used(kind: str, tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = write(tuning_path(environment), BAD_TABLES[kind])
    with pytest.raises(FormatError, match=r"ranks\.2"):
        Tuning.load(path, size=4)
    with pytest.warns(UserWarning, match="tuning.json"):
        assert host_tuning(4, environment) == default_for(4)


def test_an_order_that_fits_two_ranks_is_refused_on_four(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", {"all_reduce": [{"algorithm": "all_reduce_ring"}]})
    assert Tuning.load(path, size=2).choose("all_reduce", 8) == "all_reduce_ring"
    with pytest.raises(FormatError, match="rank order"):
        Tuning.load(path, size=4)


def test_no_file_means_the_defaults_and_no_word(tmp_path: Path) -> None:
    assert host_tuning(4, {"XDG_CONFIG_HOME": str(tmp_path)}) == default_for(4)


def test_a_folder_in_its_place_is_a_warning(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    tuning_path(environment).mkdir(parents=True)
    with pytest.warns(UserWarning, match="tuning.json"):
        assert host_tuning(2, environment) == default_for(2)


def test_a_relative_config_home_is_ignored_as_its_standard_says() -> None:
    assert tuning_path({"XDG_CONFIG_HOME": "here"}) == tuning_path({})


def test_a_table_without_the_collective_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="scan"):
        Tuning({}).choose("scan", 8)
