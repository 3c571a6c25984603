"""A host's network fitted to rows: it finds again what rows were made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.bench import Case, CaseResult, Spec, Timing
from roundelay.bench.fit import fitted_host, matrix_flops
from roundelay.errors import InvalidArgumentError
from roundelay.networks import cluster_called, save_cluster
from roundelay.planning.collective_time import RankGroup, all_reduce

SIZES = [8 * 8**power for power in range(8)]


def made(size: int, latency: float, bandwidth: float, fold: float) -> tuple[Spec, list[CaseResult]]:
    spec = Spec(size=size, cases=tuple(Case("all_reduce", nbytes) for nbytes in SIZES))
    share = (size - 1) / size
    times = [2 * latency + nbytes * share * (2 / bandwidth + 1 / fold) for nbytes in SIZES]
    return spec, [
        CaseResult("all_reduce", nbytes, nbytes // 4, {"roundelay": Timing(took, took, 1, 0)},
                   nbytes / fold if nbytes > 1 << 16 else None)
        for nbytes, took in zip(SIZES, times, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("bandwidth", [1e9, 3e10])
@pytest.mark.parametrize("latency", [1e-7, 2e-5])
def test_it_finds_what_rows_were_made_of(latency: float, bandwidth: float, size: int) -> None:
    spec, rows = made(size, latency, bandwidth, 2e10)
    found = fitted_host(spec, rows, flops=1e12)
    cluster = found.cluster
    assert cluster.latency == pytest.approx(latency, rel=1e-3)
    assert cluster.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert cluster.flops == {"fp32": 1e12 / size}
    assert found.typical < 1e-6
    # The planner's own formula says the same.
    for row in rows:
        told = all_reduce(cluster, RankGroup(inside=size), row.nbytes)
        assert told == pytest.approx(row.timings["roundelay"].seconds, rel=1e-3)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    cluster = fitted_host(*made(2, 1e-6, 1e10, 2e10), flops=1e12).cluster
    save_cluster(cluster, tmp_path / "deep" / "host.json")
    assert cluster_called("host", tmp_path / "deep") == cluster
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["host.json"]


def test_too_little_to_fit() -> None:
    spec, rows = made(2, 1e-6, 1e10, 2e10)
    with pytest.raises(InvalidArgumentError, match="rows of at least two sizes"):
        fitted_host(spec, rows[-1:], flops=1e12)
    with pytest.raises(InvalidArgumentError, match="at least 2 ranks"):
        fitted_host(Spec(size=1, cases=spec.cases), rows, flops=1e12)


def test_products_of_matrices_take_time() -> None:
    assert 0 < matrix_flops() < 1e18
