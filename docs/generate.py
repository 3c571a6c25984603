"""Write the generated pages and pictures, and refresh the outputs that the written pages show.

Run it as `make docs`. `blocks.py` runs the blocks of a page, `tables.py` and `speed.py` make the
tables in it. The tests fail when any of this is out of date, but for times, which only
`docs/generate.py --times` takes anew.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blocks import WIDTH, with_outputs
from chinese import in_step
from click.testing import CliRunner
from cuts import tensor_parallel
from experts import expert_parallel
from holdings import mixed_precision
from savings import savings
from tables import REGIONS

from roundelay import errors
from roundelay.algorithms import Algorithm, algorithms
from roundelay.cli._choose import adds_up, algorithms_of, default_algorithm
from roundelay.cli._group import COMMANDS, roundelay
from roundelay.cli.explain import SUBJECTS
from roundelay.collectives import collectives
from roundelay.fronts.kubernetes import kubernetes
from roundelay.networks import cluster_called, cluster_names, networks
from roundelay.reductions import KINDS, REDUCTIONS
from roundelay.schedule import price, prove

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SIZE = 8  # ranks in the tables
DRAWN = 4  # ranks in the pictures
NBYTES = 1 << 20

REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
NOTE = "<!-- Written by docs/generate.py; edit that, then run `make docs`. -->\n"

#: Pictures of their own, beside one per collective: file and arguments of `roundelay explain`.
EXTRA_PICTURES = {
    "five_gpus_right": ["all_reduce", "-n", "5", "-O", "direction=right"],
    "five_gpus_left": ["all_reduce", "-n", "5", "-O", "direction=left"],
    "parameter_server": ["all_reduce", "-a", "parameter_server", "-n", "5"],
    "all_reduce_two_shot": ["all_reduce", "-a", "two_shot", "-n", "4"],
    "cube_batch": ["matmul", "--split", "batch"],
    "cube_rows": ["matmul", "--split", "rows", "-n", "3"],
    "cube_batch_columns": ["matmul", "--split", "batch,columns", "-n", "2,3"],
    "all_gather_two_hosts": ["all_gather", "--hosts", "2", "-n", "6"],
    "attention_ring": ["attention", "--layout", "both", "-n", "4"],
    "pipeline_gpipe": ["pipeline", "--schedule", "gpipe"],
    "pipeline_1f1b": ["pipeline", "--schedule", "1f1b"],
    "pipeline_interleaved": ["pipeline", "--schedule", "interleaved-1f1b"],
    "pipeline_zb_h1": ["pipeline", "--schedule", "zb-h1"],
}


def generated() -> dict[str, Callable[[], str]]:
    """Return what writes each generated file, by its path from the root."""
    found: dict[str, Callable[[], str]] = {
        "docs/algorithms.md": algorithms_page,
        "docs/networks.md": networks_page,
        "docs/reductions.md": reductions_page,
        "docs/cli.md": cli_page,
    }
    for collective in collectives:
        drawn = default_algorithm(collective)
        arguments = [drawn.name, "-n", str(DRAWN)]
        found[f"docs/pictures/{drawn.name}.svg"] = partial(_picture, arguments)
    found["docs/pictures/zero_savings.svg"] = savings
    found["docs/pictures/plan_scaling.svg"] = plan_scaling
    for name, arguments in EXTRA_PICTURES.items():
        found[f"docs/pictures/{name}.svg"] = partial(_picture, arguments)
    found["docs/pictures/mixed_precision.svg"] = mixed_precision
    found["docs/pictures/tensor_parallel.svg"] = tensor_parallel
    found["docs/pictures/expert_parallel.svg"] = expert_parallel
    found["README.zh.md"] = chinese_readme
    return found


def written() -> list[Path]:
    """List the pages that people write."""
    folders = (ROOT, ROOT / "examples", ROOT / "native")
    pages = [*DOCS.rglob("*.md"), *(page for each in folders for page in each.glob("*.md"))]
    return sorted(page for page in pages if str(page.relative_to(ROOT)) not in generated())


def refreshed(text: str, *, new_times: bool = False) -> str:
    """Return a page with the outputs and tables that hold today."""
    text = REGION.sub(lambda found: f"{found[1]}{REGIONS[found[2]]()}{found[3]}", text)
    return with_outputs(text, new_times=new_times)


@contextlib.contextmanager
def refreshing(*, new_times: bool = False) -> Iterator[dict[Path, Callable[[], str]]]:
    """Refresh all written pages, several at a time; gives what waits for each."""
    texts = {page: page.read_text(encoding="utf-8") for page in written()}
    longest_first = sorted(texts, key=lambda page: -texts[page].count("\n$ "))
    pool = ThreadPoolExecutor(max_workers=1 if new_times else os.cpu_count())
    try:
        yield {
            page: pool.submit(refreshed, texts[page], new_times=new_times).result
            for page in longest_first
        }
    finally:
        pool.shutdown(cancel_futures=True)


def _picture(arguments: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        with contextlib.redirect_stderr(io.StringIO()):
            roundelay.main(["explain", *arguments, "--out", str(file)], standalone_mode=False)
        return file.read_text(encoding="utf-8")


def chinese_readme() -> str:
    """Return the Chinese README with the commands, outputs and tables of the English one."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.zh.md", "README.md")]
    return in_step(*texts)


def plan_scaling() -> str:
    """Return how the plan of docs/plan.md scales."""
    words = ["--params", "7.5e9", "--layers", "32", "--hidden", "4096", "--gpus", "64"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        silent = io.StringIO()
        with contextlib.redirect_stderr(silent), contextlib.redirect_stdout(silent):
            roundelay.main(["plan", *words, "--plot", str(file)], standalone_mode=False)
        return file.read_text(encoding="utf-8")


def _row(algorithm: Algorithm) -> str:
    schedule = algorithm.schedule(SIZE)
    cost, proof = price(schedule, NBYTES), prove(schedule)
    adds = adds_up(algorithm.collective)
    options = ", ".join(f"`{name}={value}`" for name, value in algorithm.options.items())
    cells = [
        f"[{algorithm.short_name}](../src/roundelay/algorithms/{algorithm.name}.py)",
        str(len(cost.steps)),
        str(cost.messages),
        f"{max(cost.sent) / NBYTES:.3g} S",
        f"`{proof.order}`" if adds else "-",
        str(proof.folds) if adds else "-",
        algorithm.summary + (f" Options: {options}." if options else ""),
    ]
    return f"| {' | '.join(cells)} |"


def algorithms_page() -> str:
    """Return one section per collective: what it promises, a picture, and every algorithm."""
    lines = [
        NOTE,
        "# Collectives and their algorithms",
        "",
        f"Every row is counted off the schedule on {SIZE} ranks, and proved. S is the largest",
        "buffer that a rank passes in or gets back; *sent* is what the busiest rank sends.",
        "*Order* is how results are added up, *folds* how many folds deep: see",
        "[concepts](concepts.md). `roundelay list` has other sizes, and seconds on a network.",
        "Over several hosts every collective goes in phases, each carried by one of these:",
        "[many hosts](many-hosts.md#how-a-call-goes), and `roundelay explain … --hosts 2`.",
        "",
    ]
    for collective in collectives:
        module = sys.modules[f"roundelay.collectives.{collective.name}"]
        drawn = default_algorithm(collective)
        lines += [
            f"## {collective.name}",
            "",
            (inspect.getdoc(module) or "").partition(">>>")[0].rstrip() + "\n",
            "```text",
            collective.picture(),
            "```",
            "",
            "| algorithm | steps | messages | sent | order | folds | how |",
            "|---|---:|---:|---:|---|---:|---|",
            *map(_row, algorithms_of(collective)),
            "",
            f"![{drawn.name} on {DRAWN} ranks](pictures/{drawn.name}.svg)",
            "",
        ]
    return "\n".join(lines)


def networks_page() -> str:
    """Return a section per network: its options, and what a ring all-reduce takes on it."""
    ring = algorithms.load("all_reduce_ring").schedule(16)
    lines = [
        NOTE,
        "# Networks",
        "",
        "A network says which ranks and switches are linked, with which latency and bandwidth. On",
        "a network, `price` estimates seconds. Choose one by name (`--network mesh`), with options",
        "(`--network hosts:per_host=4`), or write your own as a",
        "[file](schedule-format.md#networks). The default numbers are round and only illustrate:",
        "measure your own.",
        "",
        "| network | ring all-reduce of 64 MiB on 16 ranks | what it is |",
        "|---|---:|---|",
    ]
    sections = []
    for name in networks.names():
        make = networks.load(name)
        seconds = price(ring, 64 << 20, network=make(16)).seconds or 0.0
        text = inspect.getdoc(make) or ""
        options = [
            f"`{option.name}={_number(option.default)}`"
            for option in inspect.signature(make).parameters.values()
            if option.kind is option.KEYWORD_ONLY
        ]
        lines.append(f"| [{name}](#{name}) | {seconds * 1e3:.2f} ms | {text.splitlines()[0]} |")
        prose = text.partition(">>>")[0].strip()
        sections += ["", f"## {name}", "", prose, "", f"Options: {', '.join(options)}."]
    return "\n".join([*lines, *sections, "", *_clusters(), ""])


def _clusters() -> Iterator[str]:
    yield from (
        "## Clusters",
        "",
        "A cluster is a network of hosts for any number of ranks, with what one rank computes and",
        "holds: a small [file](schedule-format.md#clusters) with its source. `roundelay plan`",
        "[plans on one](plan.md), and `--network h100-ib` takes it everywhere else.",
        "`roundelay bench --fit` measures this host's, and calls it `host`.",
        "",
        "| cluster | ranks | in a host | between hosts | folding | latencies | memory | peak |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    )
    named = [cluster_called(name) for name in cluster_names()]
    for one in named:
        crossing = (one.latency + one.nic_latency) * 1e6
        peaks = ", ".join(f"{peak / 1e12:g} in {name}" for name, peak in one.flops.items())
        yield (
            f"| `{one.name}` | {one.per_host} | {one.bandwidth / 1e9:g} GB/s | "
            f"{one.nic_bandwidth / 1e9:g} GB/s a host | {one.reduce_bandwidth / 1e9:g} GB/s | "
            f"{one.latency * 1e6:g} µs, {crossing:g} µs | {(one.memory or 0) / 1e9:g} GB | "
            f"{peaks} TFLOPS |"
        )
    yield ""
    yield "The sources, as the files name them:"
    yield ""
    for one in named:
        yield f"- `{one.name}`: {one.source}."


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def reductions_page() -> str:
    """Return the table of reductions."""
    lines = [
        NOTE,
        "# Reductions",
        "",
        "Every fold goes from left to right in an accumulator (float32 for half types) and is",
        "rounded once. `rd.Op` makes [one of your own](communicator.md#reductions-of-your-own).",
        "",
        "| reduction | what it does | takes |",
        "|---|---|---|",
    ]
    for made in REDUCTIONS.values():
        takes = ", ".join(KINDS[kind] for kind in made.kinds)
        lines.append(f"| `{made.name}` | {made.summary} | {takes} |")
    return "\n".join([*lines, ""])


def cli_page() -> str:
    """Return the help of every command, and the errors with their exit codes."""
    lines = [
        NOTE,
        "# The command line",
        "",
        "Results go to standard output; progress, remarks and errors go to standard error. Output",
        "into a pipe or a file has no colours.",
        "",
        *(_help(name) for name in ["", *COMMANDS.names()]),
        *(_help("explain", subject) for subject in SUBJECTS),
        *(_help("kube", kind) for kind in kubernetes.names()[-1:]),  # all take the same options
        "## Exit codes and errors",
        "",
        "The exit code is 0 for success, 1 if the work failed (a proof, for example), 2 for wrong",
        "usage, and 130 after Ctrl-C. `roundelay run` returns the exit code of",
        "[the rank that failed first](running.md#a-script-roundelay-run).",
        "",
        "| error | exit code | when |",
        "|---|---:|---|",
    ]
    for name in errors.__all__:
        error = getattr(errors, name)
        code = 2 if issubclass(error, errors.InvalidArgumentError) else 1
        lines.append(f"| `{name}` | {code} | {(inspect.getdoc(error) or '').splitlines()[0]} |")
    return "\n".join([*lines, ""])


def _help(*names: str) -> str:
    arguments = [*filter(None, names), "--help"]
    shown = CliRunner(env={"COLUMNS": WIDTH}).invoke(roundelay, arguments, prog_name="roundelay")
    title = " ".join(["roundelay", *arguments[:-1]])
    return f"## {title}\n\n```console\n$ {title} --help\n{shown.output}```\n"


def main() -> None:
    """Write every file that is not as it should be."""
    made: dict[Path, Callable[[], str]] = {ROOT / name: make for name, make in generated().items()}
    with refreshing(new_times="--times" in sys.argv) as pages:
        made |= pages
        made[ROOT / "README.zh.md"] = made.pop(ROOT / "README.zh.md")  # after README.md
        for path, make in made.items():
            text = make()
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")
                print(f"wrote {path.relative_to(ROOT)}")
    for stray in set((DOCS / "pictures").glob("*.svg")) - made.keys():
        stray.unlink()
        print(f"removed {stray.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
