"""What shows itself in a notebook: pages and tables that stand by themselves, names as text."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.bench import BenchReport, Case, CaseResult, Spec, Timing
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.html_table import html_table
from roundelay.networks import cluster_called
from roundelay.planning import Task, plan, transformer

EVIL = '<script>alert("x")</script>"\'&'


class Tags(HTMLParser):
    """Keeps every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_shows_itself(name: str) -> None:
    shown = rd.explain(name)
    [(tag, frame)] = Tags(shown._repr_html_()).tags
    assert tag == "iframe"
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == shown.to_html()
    # Nothing is asked of anybody else.
    inside = Tags(frame["srcdoc"] or "").tags
    for _, attributes in inside:
        assert not {"src", "href"} & attributes.keys()
    assert "default-src 'none'" in shown.to_html()
    text = str(shown)
    assert text == repr(shown)
    assert text.startswith(f"{name} on 4 ranks")
    assert "\x1b" not in text


def test_the_words_of_rd_explain() -> None:
    assert rd.explain("all_reduce", "ring", 5).schedule.size == 5
    assert rd.explain("all-reduce").schedule.name == "all_reduce_ring"
    assert rd.explain("broadcast", "chain", 4, root=2, segments=2).schedule.root == 2
    named = rd.explain(
        "all_reduce", "hierarchical", 8, network=cluster_called("h100-ib").network(8)
    )
    assert named.picture.price is not None
    assert named.picture.price.network == "h100-ib"
    with pytest.raises(UnknownNameError, match="Did you mean 'ring'"):
        rd.explain("all_reduce", "rings")
    with pytest.raises(InvalidArgumentError, match="from 1 to 64"):
        rd.explain("all_reduce", size=0)


def test_names_are_text() -> None:
    shown = rd.explain("all_reduce", rank_name=EVIL)
    page = shown._repr_html_()
    [(_, frame)] = Tags(page).tags
    scripts = [tag for tag, _ in Tags(frame["srcdoc"] or "").tags if tag == "script"]
    assert len(scripts) == len([tag for tag, _ in Tags(rd.explain("all_reduce").to_html()).tags
                                if tag == "script"])  # fmt: skip
    table = html_table([EVIL], [[EVIL]], title=EVIL, notes=[EVIL])
    assert "script" not in {tag for tag, _ in Tags(table).tags}
    assert unescape(table).count(EVIL) == 4


def test_it_is_saved(tmp_path: Path) -> None:
    shown = rd.explain("all_gather", "ring", 3)
    assert shown.save(tmp_path / "ring.svg").read_text(encoding="utf-8") == shown.to_svg()
    assert shown.save(tmp_path / "ring.html").read_text(encoding="utf-8") == shown.to_html()
    with pytest.raises(InvalidArgumentError, match=r"\.html or \.svg"):
        shown.save(tmp_path / "ring.png")


def rows_of(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in rows]  # fmt: skip


def test_a_bench_report() -> None:
    spec = Spec(size=2, cases=(Case("all_reduce", 1024),), contenders=("roundelay", "gloo"))
    row = CaseResult("all_reduce", 1024, 256,
                     {"roundelay": Timing(1e-5, 9e-6, 100, 0), "gloo": Timing(4e-5, 3e-5, 50, 0)},
                     floor=1e-6)  # fmt: skip
    report = BenchReport(spec, [row], {"gloo": EVIL})
    head, only = rows_of(report._repr_html_())
    assert dict(zip(head, only, strict=True)) == {
        "bytes": "1024", "time (µs)": "10", "busbw (GB/s)": "0.10", "wrong": "0", "floor": "10 %",
        "gloo (µs)": "40", "ratio": "4.00x"}  # fmt: skip
    assert "<script" not in report._repr_html_()
    assert str(report).splitlines()[2].split() == [word for cell in only for word in cell.split()]
    assert report.document()["config"]


def test_a_plan() -> None:
    model = transformer(params=7_500_000_000, layers=32, hidden=4096)
    found = plan(Task(model, cluster_called("h100-ib"), 64, 80 * 10**9, 2048, 2048))
    page = found._repr_html_()
    head, *rows = rows_of(page)
    assert len(rows) == sum(map(len, found.shown()))
    assert page.count("font-weight:bold") == 1
    assert head[0] == "strategy"
