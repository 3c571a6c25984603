"""Wrong use ends with exit code 2, nothing on standard output, and words that end the search."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.algorithms import algorithms

CASES = {
    # unknown names, with the nearest
    "list allreduse": "Did you mean 'all_reduce'?",
    "explain brodcast": "Did you mean 'broadcast'?",
    "explain all_reduce -a rung": "Did you mean 'ring'?",
    "explain all_reduce --diff ring,tre": "Did you mean 'tree'?",
    "explain all_reduce --asci": "'--ascii'",
    "explain all_reduce -O dirction=left": "Did you mean 'direction'?",
    "explain all_reduce -O direction=up": "Known: left, right.",
    "explain all_reduce --values '1 2' --op sim": "Did you mean 'sum'?",
    "list --network swich": "Did you mean 'switch'?",
    "list --network hosts:per_hots=4": "Did you mean 'per_host'?",
    "prove all_reduce_rng": "Did you mean 'all_reduce_ring'?",
    # sizes and roots
    "explain all_reduce -n 0": "at least 1 rank",
    "explain all_reduce -n -3": "at least 1 rank",
    "explain all_reduce -n x": "not a valid integer",
    "explain all_reduce -n 100000": "up to 1024 ranks",
    "explain all_reduce -n 300": "Use fewer ranks",
    "list -n 0": "at least 1 rank",
    "prove --sizes 0-3": "takes 1 to 1024 ranks",
    "prove --sizes 1-100000": "takes 1 to 1024 ranks",
    "prove --sizes 5-3": "write 3-5",
    "bench --iterations 0": "take 1 or more",
    "prove --sizes some": "write 1-16",
    "explain broadcast --root 4": "roots go from 0 to 3",
    "explain broadcast --root -1": "roots go from 0 to 3",
    "explain all_reduce --root 1": "Leave out --root",
    "explain all_reduce -a hierarchical -O group=3": "multiples of its group of 3",
    # options
    "explain broadcast -a chain -O segments=0": "from 1 to 65536",
    "explain broadcast -a chain -O segments=1000000000": "from 1 to 65536",
    "explain broadcast -a chain -O segments=x": "Its default is 4",
    "explain broadcast -a chain -O segments": "name=value",
    "explain broadcast -a chain -O segments=2 -O segments=3": "twice",
    "list -n 99999999999999999999": "up to 1024 ranks",
    "explain all_reduce --bytes 0": "between 1 byte",
    "explain all_reduce --bytes -1": "between 1 byte",
    "explain all_reduce --bytes 1XB": "write 1MiB",
    "explain all_reduce --bytes nan": "write 1MiB",
    "explain all_reduce --bytes 1e999": "between 1 byte",
    "explain all_reduce --diff ring": "--diff ring,tree",
    "explain all_reduce --diff ring,tree,ring": "--diff ring,tree",
    "explain all_reduce --diff ring,tree -a ring": "without --algorithm",
    "explain all_reduce --program 4": "ranks 0 to 3",
    "explain all_reduce --program 0 --diff ring,tree": "Leave out",
    "explain": "such as all_reduce",
    "prove all_reduce --schedule mine.json": "not both",
    # values
    "explain all_reduce --values '1,x'": "'x' of rank 0 is not a number",
    "explain all_reduce --values '1,,2'": "is not a number",
    "explain all_reduce --values ' '": "--values is empty",
    "explain all_reduce --values '1,1 2'": "one length on every rank",
    "explain all_reduce --values '99999999999999999999 1'": "1e20",
    "explain all_reduce --values '1 2' -n 3": "Leave out -n",
    "explain all_reduce --values '1.5 2' --op band": "band takes",
    "explain scan --values '1 2' --op avg": "scan has no avg",
    "explain barrier --values '1 2'": "carries no data",
    "explain all_reduce --counts 1": "Give both",
    "explain all_reduce --op max": "Give both",
    "explain reduce_scatter --values '1,1 2,2 3,3 4,4'": "--counts 1,1,0,0",
    "explain scatter --values '1,1 2,2 3,3 4,4'": "--counts 1,1,0,0",
    "explain reduce_scatter --values '1,1 2,2' --counts 1": "needs counts= of 2",
    "explain reduce_scatter --values '1,1 2,2' --counts 1,x": "as in 1,1,0,0",
    "explain reduce_scatter --values '1,1 2,2' --counts 2,2": "counts",
    # manifests
    "kube trainjobs": "Did you mean 'trainjob'?",
    "kube trainjob --nodes 2 --ranks 8 train.py": "Missing option '--image'",
    "kube trainjob --nodes 2 --ranks 8 --image :1 train.py": "is no name of an image",
    "kube trainjob --nodes 3 --ranks 8 --image a train.py": "Write --ranks 9",
    "kube trainjob --nodes -1 --ranks 8 --image a train.py": "--nodes -1: a job has 1 to",
    "kube trainjob --nodes x --ranks 8 --image a train.py": "not a valid integer",
    "kube trainjob --nodes 2 --ranks 8 --image a --name A_b train.py": "no name in Kubernetes",
    "kube trainjob --nodes 2 --ranks 8 --image a --env A train.py": "Write NAME=VALUE",
    "kube trainjob --nodes 2 --ranks 8 --image a --elastic train.py": "kube pytorchjob --elastic",
    "kube trainjob --nodes 2 --ranks 8 --image a --out . train.py": "job.yaml",
    "kube mpijob --nodes 2 --ranks 8 --image a": "Missing argument 'SCRIPT'",
    # files
    "explain --schedule nope.json": "nope.json",
    "explain --schedule .": "folder",
    "prove --schedule nope.json": "nope.json",
    "explain all_reduce --network nope.json": "nope.json",
    "explain all_reduce --out ring.pdf": ".html",
    "explain all_reduce --out ring": ".svg",
    "explain all_reduce --out no/such/folder/ring.html": "there is no folder",
    "explain all_reduce --out .": "Add a file name",
    "explain all_reduce --diff ring,tree --out both.json": "holds one schedule",
    "explain all_reduce --schedule good.json -n 4": "Leave out -n",
    "explain broadcast --schedule good.json": "a schedule of all_reduce",
    "explain --schedule bad.json": "bad.json",
}


@pytest.mark.parametrize("line", CASES)
def test_wrong_use_says_what_to_do(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("explain", "all_reduce", "--out", "good.json").exit_code == 0
    Path("bad.json").write_text('{"roundelay": 1, "transfers": [')
    result = run(*shlex.split(line))

    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert CASES[line] in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "good.json"]


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_refuses_an_unknown_option(run: Callable[..., Result], name: str) -> None:
    collective = algorithms.load(name).collective.name
    result = run("explain", collective, "-a", name, "-O", "colour=red")

    assert result.exit_code == 2
    assert "colour" in result.stderr


def test_terminal_codes_in_names_are_not_passed_on(run: Callable[..., Result]) -> None:
    for line in (
        ["explain", "\x1b[2J"],
        ["\x1b[2J"],
        ["explain", "all_reduce", "--out", "\x1b[2J"],
    ):
        result = run(*line)
        assert result.exit_code == 2
        assert "\x1b" not in result.stderr

    result = run("explain", "all_reduce", "--rank-name", "\x1b[2J")
    assert "\x1b" not in result.stdout


def test_folder_that_can_not_be_written_is_an_error_not_a_crash(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    result = run("explain", "all_reduce", "--out", str(tmp_path / "ring.json"))

    assert result.exit_code == 2
    assert "Permission denied" in result.stderr
