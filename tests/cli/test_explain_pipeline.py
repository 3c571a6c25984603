"""`roundelay explain pipeline` shows every schedule truly, and refuses what can't be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import Result

from roundelay.pipelines import (
    PipelineSchedule,
    StageCosts,
    load_pipeline,
    pipeline_called,
    pipelines,
    price_pipeline,
    prove_pipeline,
    save_pipeline,
)
from roundelay.view.pipeline_picture import pipeline_picture
from roundelay.view.pipeline_svg import LEFT, MARGIN, TIMELINE, pipeline_html, pipeline_svg

SVG = "{http://www.w3.org/2000/svg}"
WORDS = [maker.word for maker in pipelines]
Run = Callable[..., Result]


@pytest.mark.parametrize("word", WORDS)
def test_a_line_per_rank_has_every_action_in_its_order(word: str, run: Run) -> None:
    result = run("explain", "pipeline", "--schedule", word, "-n", "4", "--micro-batches", "8")
    assert result.exit_code == 0, result.stderr
    schedule = pipeline_called(word)(4, 8)
    price, proof = price_pipeline(schedule), prove_pipeline(schedule)
    letters = {"forward": "F", "backward": "B", "input_grad": "B", "weight_grad": "W"}
    for rank, actions in enumerate(schedule.ranks):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"GPU {rank} ")]
        drawn = "".join(line.partition(f"GPU {rank}")[2].partition("  keeps")[0].strip()
                        for line in lines)  # fmt: skip
        assert f"keeps {proof.peaks[rank]}" in lines[-1]
        said = drawn.upper().replace("·", "").replace("─", "")
        assert said == "".join(f"{letters[kind]}{number}" for kind, _, number in actions)
        assert len(drawn) == 2 * price.makespan
        assert drawn.count("·") == 2 * (price.makespan - price.busy[rank])
    assert f"{price.bubble:.1%} of the time is bubble" in result.stdout
    assert pipeline_called(word).formula in result.stdout


def test_plain_ascii_and_narrow(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("explain", "pipeline", "--ascii", "--schedule", "gpipe", "-n", "2")
    assert result.stdout.isascii()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("explain", "pipeline", "--micro-batches", "12")
    rows = [line for line in narrow.stdout.splitlines() if line.startswith("GPU 0")]
    assert len(rows) > 1
    assert all(len(line) <= 40 for line in rows)


def test_other_costs_and_transfers(run: Run) -> None:
    result = run("explain", "pipeline", "--costs", "1,0.5,0.5", "--transfer", "0.25")
    priced = price_pipeline(pipeline_called("1f1b")(4, 8), StageCosts(1, 0.5, 0.5), transfer=0.25)
    assert f"{priced.bubble:.1%} of the time is bubble\n" in result.stdout  # no formula holds


@pytest.mark.parametrize("word", WORDS)
def test_boxes_of_the_drawing_lie_where_the_price_says(word: str) -> None:
    schedule = pipeline_called(word)(4, 8)
    price = price_pipeline(schedule)
    root = ET.fromstring(pipeline_svg(pipeline_picture(schedule)))
    boxes = [each for each in root.iter(f"{SVG}rect") if "box" in each.get("class", "").split()]
    spans = [span for mine in price.spans for span in mine]
    assert len(boxes) == len(spans)
    for box, span in zip(boxes, spans, strict=True):
        start = (float(box.get("x", 0)) - 0.5 - MARGIN - LEFT) / TIMELINE * price.makespan
        assert start == pytest.approx(span.start, abs=0.01)
        title = box.find(f"{SVG}title")
        assert title is not None
        assert (title.text or "").startswith(str(span.action))
        assert f"m{span.action.micro_batch}" in box.get("class", "").split()


def test_names_are_shown_as_text_only() -> None:
    hostile = "</style><script>alert(1)</script>&\x00"
    schedule = pipeline_called("1f1b")(2, 2)
    own = PipelineSchedule(schedule.ranks, 2, name=hostile)
    picture = pipeline_picture(own, rank_name=hostile)
    ET.fromstring(pipeline_svg(picture))
    for text in (pipeline_svg(picture), pipeline_html(picture)):
        assert "<script" not in text
        assert "\x00" not in text


def test_files(run: Run, tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.svg", "a.html", "a.json")]
    outs = [word for name in names for word in ("--out", name)]
    result = run("explain", "pipeline", "--schedule", "zb-h1", *outs)
    assert result.exit_code == 0
    assert "open it in any browser" in result.stderr
    assert load_pipeline(names[2]).ranks == pipeline_called("zb-h1")(4, 8).ranks
    again = run("explain", "pipeline", "--schedule", names[2])
    assert "zb-h1: 4 stages on 4 ranks" in again.stdout
    assert "Content-Security-Policy" in Path(names[1]).read_text()


def test_a_schedule_of_your_own_that_fails_is_told(run: Run, tmp_path: Path) -> None:
    good = pipeline_called("1f1b")(2, 2)
    path = tmp_path / "mine.json"
    save_pipeline(PipelineSchedule([good.ranks[0][:-1], good.ranks[1]], 2), path)
    result = run("explain", "pipeline", "--schedule", str(path))
    assert result.exit_code == 1
    assert "rank 0, stage 0, micro-batch 1, backward: missing" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "1f2b"], "Did you mean '1f1b'"),
        (["--schedule", "nowhere.json"], "can't be read"),
        (["--schedule", "nowhere.json", "-n", "4"], "says all that itself"),
        (["--stages", "0"], "0 stages"),
        (["--stages", "6", "-n", "4"], "6 stages do not divide"),
        (["--stages", "8", "-n", "4"], "one stage on every rank"),
        (["--schedule", "interleaved-1f1b", "--micro-batches", "6"], "multiple of 4"),
        (["--micro-batches", "0"], "micro_batches"),
        (["--micro-batches", "60000"], "too many to draw"),
        (["--costs", "1,2"], "three numbers"),
        (["--costs", "1,2,-3"], "from 0"),
        (["--transfer", "nan"], "from 0"),
        (["--out", "a.txt"], "must end in"),
        (["--out", "/nowhere/a.svg"], "no folder"),
    ],
)
def test_what_can_not_be_drawn(words: list[str], said: str, run: Run) -> None:
    result = run("explain", "pipeline", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_help_tells_of_both(run: Run) -> None:
    assert "explain pipeline" in run("explain", "--help").stdout
    told = run("explain", "pipeline", "--help").stdout
    assert "--micro-batches" in told
    assert "roundelay explain pipeline" in told


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("batches", [6, 12, 48])
def test_all_ranks_have_squares_for_what_they_keep_or_none_has(
    word: str, ranks: int, batches: int
) -> None:
    schedule = pipeline_called(word)(ranks, batches - batches % ranks)
    picture = pipeline_picture(schedule)
    root = ET.fromstring(pipeline_svg(picture))
    squares = [one for one in root.iter(f"{SVG}rect") if one.get("class") == "kept"]
    assert len(squares) in (0, sum(picture.peaks))
    assert bool(squares) == (max(picture.peaks) <= 12)
    words = [one.text or "" for one in root.iter(f"{SVG}text") if one.get("class") == "in ink"]
    alone = any(each.isdigit() for each in words)
    legend = "".join("".join(one.itertext()) for one in root.iter(f"{SVG}text"))
    assert ("narrow boxes have the number alone" in legend) == alone


KINDS = [["matmul"], ["attention"], ["attention", "--method", "ulysses"], ["pipeline"],
         ["pipeline", "--schedule", "interleaved-1f1b"]]  # fmt: skip
NOT_SAID = ("computed before", "keeps", "waits", "sends", "micro-batch", "Step", "Point at",
            "a piece shows", "One colour")  # fmt: skip


@pytest.mark.parametrize("words", KINDS, ids=" ".join)
def test_told_in_chinese(run: Run, tmp_path: Path, words: list[str]) -> None:
    text = run("explain", *words, "--lang", "zh").stdout
    page, drawing = tmp_path / "x.html", tmp_path / "x.svg"
    result = run("explain", *words, "--lang", "zh", "--out", str(page), "--out", str(drawing))
    assert result.exit_code == 0, result.stderr
    html = page.read_text(encoding="utf-8")
    assert '<html lang="zh">' in html
    seen = html.partition("<script")[0]  # its words in both languages are in there
    for said in (text, seen, drawing.read_text(encoding="utf-8")):
        assert re.search("[\u4e00-\u9fff]", said)
        assert not [word for word in NOT_SAID if word in said]
    assert run("explain", *words, "--lang", "xx").exit_code == 2
