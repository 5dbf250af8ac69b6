"""A step of the model uses tensors of one device only, and the host reads no result."""

import subprocess
import sys

import pytest

from tests.support.paths import environment


@pytest.mark.full
def test_model_uses_one_device() -> None:
    command = [sys.executable, "-m", "tests.support.workloads.fake_device"]
    finished = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
