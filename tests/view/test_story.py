"""The story is true: what it says of phases, terms and shapes is what the frames hold."""

from __future__ import annotations

import re

import pytest

from roundelay.algorithms import algorithms
from roundelay.networks import networks
from roundelay.schedule import Cell, Schedule, from_json, to_json
from roundelay.view import Picture, picture

SIZES = (1, 2, 3, 4, 5, 8, 12, 16)
TERMS = re.compile(r"(every rank|GPU\d+) now holds (\d+) of (\d+) terms of (one chunk|the sum)")
READY = re.compile(r"(\d+) of (\d+) ranks now hold")


def drawn(name: str, size: int) -> Picture:
    return picture(algorithms.load(name).schedule(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_every_step_has_its_sentence_and_place(name: str, size: int) -> None:
    image = drawn(name, size)
    story = image.story
    assert len(story.words) == len(story.places) == len(image.frames)
    assert all(re.fullmatch(r"[A-Z0-9].*\.", words) for words in story.words)
    assert not [words for words in story.words if "None" in words or "  " in words]

    # Phases follow each other without a gap, and the plan counts their steps.
    planned = [
        (found[1], int(found[2])) for found in re.finditer(r"(?:^|then )(.*?) \((\d+) ", story.plan)
    ]
    places = [f"{phase}, {at} of {steps}" if steps > 1 else phase
              for phase, steps in planned for at in range(1, steps + 1)]  # fmt: skip
    assert [*story.places[1:]] == (places or [""] * (len(image.frames) - 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_what_it_says_is_what_ranks_hold(name: str, size: int) -> None:
    image = drawn(name, size)
    due = dict(image.schedule.due_after())
    for frame, words in zip(image.frames, image.story.words, strict=True):
        for who, terms, of, _ in TERMS.findall(words):
            written = {rank: frame.cells[Cell(rank, chunk)] for rank, chunk in frame.changed}
            ranks = range(size) if who == "every rank" else [int(who[3:])]
            assert int(of) == size
            assert {len(set(written[rank].ranks)) for rank in ranks} == {int(terms)}
        for count, _ in READY.findall(words):
            ready = [rank for rank in range(size) if (mine := [c for c in due if c.rank == rank])
                     and all(c in frame.cells and frame.cells[c].done for c in mine)]  # fmt: skip
            assert len(ready) == int(count)
    if size > 1:
        assert re.search(r"now (holds|knows)|their results", image.story.words[-1])


@pytest.mark.parametrize(
    ("name", "size", "phases"),
    [
        ("all_reduce_ring", 5, ["reduce-scatter (4", "all-gather (4"]),
        ("all_reduce_two_shot", 4, ["reduce-scatter (1", "all-gather (1"]),
        ("all_reduce_halving_doubling", 8, ["reduce-scatter (3", "all-gather (3"]),
        ("all_reduce_tree", 8, ["reduce (3", "broadcast (3"]),
        ("all_reduce_parameter_server", 4, ["reduce (1", "broadcast (1"]),
        ("all_reduce_double_binary_tree", 8, ["reduce up both trees (3", "broadcast down both (3"]),
        ("all_reduce_recursive_doubling", 8, []),
        ("all_reduce_recursive_doubling", 6, ["all-reduce (3", "broadcast (1"]),
        ("all_reduce_hierarchical", 4, ["reduce-scatter inside each host (1",
         "reduce-scatter between hosts (1", "all-gather between hosts (1",
         "all-gather inside each host (1"]),
        ("broadcast_scatter_all_gather", 8, ["scatter (3", "all-gather (7"]),
        ("broadcast_chain", 8, []),
        ("reduce_scatter_gather", 8, ["reduce-scatter (7", "gather (3"]),
        ("reduce_two_shot", 4, ["reduce-scatter (1", "gather (1"]),
        ("exscan_hillis_steele", 8, ["shift (1", "scan (3"]),
        ("barrier_tree", 8, ["report (3", "release (3"]),
        ("all_to_all_bruck", 8, []),
    ],
)  # fmt: skip
def test_phases_are_named_by_what_they_do(name: str, size: int, phases: list[str]) -> None:
    plan = drawn(name, size).story.plan.replace("down both trees", "down both")
    assert re.findall(r"(?:^|then )(.*? \(\d+)", plan) == phases


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("name", algorithms.names())
def test_a_file_tells_the_same_story(name: str, size: int) -> None:
    schedule = algorithms.load(name).schedule(size)
    again = from_json(to_json(schedule))
    assert picture(schedule).story == picture(again).story
    assert picture(schedule).shape == picture(again).shape


def test_a_broken_schedule_is_told_as_it_is() -> None:
    ring = algorithms.load("all_reduce_ring").schedule(4)
    kept = [transfer for index, transfer in enumerate(ring.transfers) if index != 9]
    words = picture(Schedule(ring.collective, 4, kept, parts=4)).story.words
    assert words[3].endswith("each of GPU0, GPU1 and GPU3 now holds one finished chunk.")
    assert words[6].endswith("every rank now holds 3 of 4 finished chunks.")


@pytest.mark.parametrize("size", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", algorithms.names())
def test_trees_hold_all_that_is_sent(name: str, size: int) -> None:
    image = drawn(name, size)
    for tree in image.shape.trees:
        assert tree.parents[tree.root] is None
        assert sum(parent is None for parent in tree.parents) == 1
        for transfer in image.schedule.transfers:
            if transfer.chunk in tree.chunks:
                up = tree.parents[transfer.src] == transfer.dst
                assert up or tree.parents[transfer.dst] == transfer.src
    if "tree" in name or "binomial" in name:
        assert len(image.shape.trees) == (2 if "double" in name else 1)


@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_hosts_are_those_of_the_algorithm_or_the_network(size: int) -> None:
    hierarchical = algorithms.load("all_reduce_hierarchical")
    for group in (2, size // 2):
        found = picture(hierarchical.schedule(size, group=group)).shape.hosts
        assert found == tuple(tuple(range(low, low + group)) for low in range(0, size, group))
    graph = networks.load("hosts")(size, per_host=2)
    ring = picture(algorithms.load("all_reduce_ring").schedule(size), hosts=graph.hosts())
    assert [len(ranks) for ranks in ring.shape.hosts] == [2] * (size // 2)
    assert networks.load("switch")(size).hosts() == {}


@pytest.mark.parametrize("size", [2, 5, 13])
def test_blocks_of_an_exchange_are_named_by_their_ends(size: int) -> None:
    image = drawn("all_to_all_direct", size)
    assert image.chunks == tuple(f"{src}→{dst}" for src in range(size) for dst in range(size))
    for cell, view in image.frames[-1].cells.items():
        assert view.text == image.chunks[cell.chunk]
