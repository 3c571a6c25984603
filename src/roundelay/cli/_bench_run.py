"""Run measurements with a bar on standard error, and write what they teach."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import click

from roundelay.bench import CaseResult, PeerVersions, Spec, measure
from roundelay.bench.fit import fitted_host, matrix_flops
from roundelay.bench.tune import specs, tuned
from roundelay.cli._choose import own_networks
from roundelay.cli._progress import progress_bar
from roundelay.collectives import collectives
from roundelay.networks import save_cluster
from roundelay.tuning import Tuning, tuning_path
from roundelay.view.terminal_text import nbytes_text, seconds_text


def run_all(runs: Sequence[Spec], label: str) -> tuple[list[CaseResult], dict[str, str]]:
    """Return all rows of all runs, and the versions of the peers."""
    rows: list[CaseResult] = []
    versions: dict[str, str] = {}
    with progress_bar() as bar:
        task = bar.add_task(label, total=sum(len(run.cases) for run in runs))
        for run in runs:
            for message in measure(run):
                if isinstance(message, PeerVersions):
                    versions.update(message.versions)
                else:
                    rows.append(message)
                    case = f"{label} {message.collective} {nbytes_text(message.nbytes)}"
                    bar.update(task, advance=1, description=case)
    return rows, versions


def save_fit(spec: Spec, rows: Sequence[CaseResult]) -> None:
    """Fit this host's network to measured rows, save it, and say on stderr what it is."""
    found = fitted_host(spec, rows, flops=matrix_flops())
    cluster, path = found.cluster, own_networks() / f"{found.cluster.name}.json"
    save_cluster(cluster, path)
    click.echo(
        f"Wrote {path}: latency {seconds_text(cluster.latency)}, bandwidth "
        f"{cluster.bandwidth / 1e9:.3g} GB/s, folding {cluster.reduce_bandwidth / 1e9:.3g} GB/s, "
        f"{cluster.flops['fp32'] / 1e9:.3g} GFLOPS for each of {spec.size} ranks. The formula is "
        f"{100 * found.typical:.0f} % off, typically. Use it as --network {cluster.name}.",
        err=True,
    )


def tune(collective: str | None, size: int, sizes: Sequence[int], *, engine: str) -> None:
    """Measure algorithms against one another; write this host's table, and say what it says."""
    names = collectives.names() if collective is None else [collective]
    runs = list(specs(names, size, sizes, engine=engine))
    rows, _ = run_all(runs, "Tuning")
    path = tuning_path(os.environ)
    try:
        base = Tuning.load(path, size=size)
    except FileNotFoundError:
        base = Tuning()
    tuning = tuned(rows, base)
    tuning.save(path, size=size)
    for name in names:
        choices = [
            choice.algorithm
            + (f" up to {nbytes_text(choice.up_to)}" if math.isfinite(choice.up_to) else "")
            for choice in tuning.table[name]
        ]
        click.echo(f"{name}: {', then '.join(choices)}")
    click.echo(f"Wrote {path}; every run on {size} ranks or more reads it.", err=True)
