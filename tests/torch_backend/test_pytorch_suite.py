"""A few of PyTorch's own tests; `pytorch_suite.py` runs all, and writes the table of the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parent / "pytorch_suite.py"
NAMES = [
    "test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync",
    "test_all_gather_coalesced_simple", "test_all_reduce_sum_async", "test_broadcast_full_group",
    "test_get_future", "test_isend", "test_monitored_barrier_gloo",
    "test_new_subgroups_with_group_param", "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]  # fmt: skip


def test_pytorchs_own_tests_pass() -> None:
    done = subprocess.run(
        [sys.executable, str(SUITE), "--work", "gloo", "roundelay", "4"],
        input="\n".join(NAMES), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith('["test_')]
    wrong = [line for line in found if '"passed"' not in line]
    assert wrong == []
    assert len(found) == len(NAMES), done.stderr[-2000:]
