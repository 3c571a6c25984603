from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.engines import engines
from roundelay.engines.mpi.mpirun import find_mpirun
from roundelay.errors import InvalidArgumentError

MOST = 7  # ranks that a test of every engine takes


NO_GPU = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs GPUs of NVIDIA")
ENGINES = [
    pytest.param(name, marks=NO_GPU if name == "nccl" else ())
    for name in engines.names()
    if name != "hierarchical"
]


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "mpi":
        try:
            find_mpirun()
        except InvalidArgumentError as error:
            pytest.skip(str(error))
    if request.param == "nccl":
        count = pytest.importorskip("torch").cuda.device_count()
        if count < MOST:
            pytest.skip(f"there are {count} GPUs, and {MOST} ranks")
    with engines.load(request.param).runner() as runner:
        yield runner
