"""The fronts for Keras and TensorFlow on the real packages, where these are installed.

They are not part of the environment of the tests: in one of their own, `pip install tensorflow-cpu
keras jax` beside Roundelay, and run this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("script", "backend", "needs"),
    [
        ("on_tensorflow.py", "tensorflow", ("tensorflow",)),
        ("on_keras.py", "tensorflow", ("keras", "tensorflow")),
        ("on_keras.py", "jax", ("keras", "jax")),
        ("on_keras.py", "torch", ("keras", "torch")),
    ],
)
def test_on_two_ranks(script: str, backend: str, needs: tuple[str, ...]) -> None:
    if missing := [name for name in needs if find_spec(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    done = subprocess.run(
        [sys.executable, "-m", "roundelay", "run", "-n", "2", str(FOLDER / script)],
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2
