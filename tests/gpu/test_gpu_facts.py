"""NVML's facts about a GPU agree with CUDA, idle and under load."""

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from parbench.bench.machine.disturbance import UNKNOWN
from parbench.bench.machine.doctor import examine_this_host
from parbench.bench.machine.gpu import Gpu, read_report, select_visible
from tests.support.paths import Command

pytestmark = pytest.mark.gpu
UTILIZATION_SECONDS = 2.0
"""NVML reports the utilization of the last second."""


def read_first_gpu() -> Gpu:
    uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
    [gpu] = [gpu for gpu in read_report(os.environ).gpus if gpu.uuid == f"GPU-{uuid}"]
    return gpu


def test_gpu_facts_equal_cuda_properties() -> None:
    gpu = read_first_gpu()
    properties = torch.cuda.get_device_properties(0)
    assert gpu.name == properties.name
    assert gpu.memory_bytes is not None
    reserved_bytes = gpu.memory_bytes - properties.total_memory
    assert 0 <= reserved_bytes < 0.05 * gpu.memory_bytes


def test_visible_gpus_equal_cuda_devices() -> None:
    report = read_report(os.environ)
    uuids = [gpu.uuid for gpu in select_visible(report.gpus, os.environ)]
    assert len(uuids) == torch.cuda.device_count()
    assert read_first_gpu().uuid == uuids[0]
    known_pairs = report.get_links_by_pair().keys()
    for first in uuids:
        for second in uuids:
            assert first == second or frozenset((first, second)) in known_pairs


@pytest.mark.parametrize(
    "topic", ["driver", "memory in use", "clocks", "power", "memory errors", "pcie"]
)
def test_doctor_knows_data_center_gpu(topic: str) -> None:
    findings = {finding.topic: finding for finding in examine_this_host(os.environ)}
    assert findings[f"gpu {topic}"].facts != UNKNOWN


def test_data_center_gpu_reports_health() -> None:
    gpu = read_first_gpu()
    assert gpu.slowed_by is not None
    assert gpu.errors_uncorrected is not None
    assert gpu.remap_failed is not None
    assert gpu.mig is not None


def test_busy_gpu_reports_clocks_and_memory() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stop = threading.Event()

    def multiply_until_stopped() -> None:
        while not stop.is_set():
            for _ in range(20):
                matrix @ matrix
            torch.cuda.synchronize()

    thread = threading.Thread(target=multiply_until_stopped)
    thread.start()
    time.sleep(UTILIZATION_SECONDS)
    gpu = read_first_gpu()
    stop.set()
    thread.join()
    assert gpu.sm_clock is not None
    assert gpu.sm_clock_max is not None
    assert 0.5 * gpu.sm_clock_max < gpu.sm_clock <= gpu.sm_clock_max
    assert gpu.memory_used_bytes is not None
    assert gpu.memory_used_bytes >= matrix.nbytes
    assert "idle" not in (gpu.slowed_by or ())


@pytest.mark.parametrize(("device", "ranks"), [("cuda", "--nproc 1"), ("cpu", "--nproc 2")])
def test_run_records_gpu_only_on_cuda(
    parbench: Command, tmp_path: Path, device: str, ranks: str
) -> None:
    options = "all_reduce --sizes 1K --repetitions 1 --budget 10s"
    completed = parbench("run", *options.split(), "--device", device, *ranks.split())
    assert completed.returncode == 0, completed.stdout + completed.stderr
    [file] = tmp_path.glob("runs/*Z-*/run.json")
    facts = msgspec.json.decode(file.read_bytes())["environment"]
    if device == "cpu":
        assert "gpu" not in facts
        assert "same GPU" not in facts["locality"].values()
    else:
        assert facts["gpu"]["uuid"] == read_first_gpu().uuid
