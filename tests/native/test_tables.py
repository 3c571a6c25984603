"""One table each: what Python says of dtypes, reductions and the rest is what the core says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

_core = pytest.importorskip("roundelay._core")
if not hasattr(_core, "World"):
    pytest.skip("half of the core needs Linux", allow_module_level=True)

from roundelay.engines._native.encode import SPACES  # noqa: E402 - only where it can be imported
from roundelay.engines._native.tables import TABLES, check_tables  # noqa: E402 - likewise
from roundelay.errors import NoEngineError  # noqa: E402 - likewise
from roundelay.live.world_report import ENDED  # noqa: E402 - likewise
from roundelay.reductions import DTYPES, REDUCTIONS  # noqa: E402 - likewise


def test_the_core_that_was_built_is_the_one_that_is_meant() -> None:
    check_tables(_core)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("change", ["missing", "turned", "longer"])
def test_a_core_of_other_sources_is_refused_by_name(name: str, change: str) -> None:
    tables = dict(TABLES)
    table = tables.pop(name)
    if change != "missing":
        numbers = isinstance(table, int)
        turned = table - 1 if numbers else table[::-1]
        tables[name] = turned if change == "turned" else table * 2
    with pytest.raises(NoEngineError, match=f"its {name} differ.*pip install"):
        check_tables(SimpleNamespace(**tables))


def test_kernels_are_known_by_those_names_alone() -> None:
    for op in (*REDUCTIONS, "mean"):
        for dtype in (*DTYPES, "float8"):
            known = op in REDUCTIONS and dtype in DTYPES
            assert known or not _core.supports(op, dtype)
    assert all(any(_core.supports(op, dtype) for dtype in DTYPES) for op in REDUCTIONS)
    assert all(_core.supports("sum", dtype) for dtype in DTYPES)


def test_every_name_of_a_table_has_its_word() -> None:
    assert set(ENDED) == set(_core.ENDINGS)
    assert list(SPACES) == list(_core.SPACES)
    for table in (_core.INSTRUCTIONS, _core.LIVES, _core.LOSSES, _core.WAITS):
        assert len(set(table)) == len(table) > 1
