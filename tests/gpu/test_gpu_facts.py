"""What the driver's tool tells of a GPU agrees with what CUDA says of it, idle and under load."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from parbench.bench.machine.doctor import UNKNOWN, examine_here, render
from parbench.bench.machine.gpu import Gpu, gpu_links, gpus_of, in_detail, visible_gpus
from tests.support.paths import Command, environment

pytestmark = pytest.mark.gpu


def first() -> Gpu:
    uuid = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    [found] = in_detail(os.environ, gpus_of(os.environ, "-i", uuid))
    assert found.uuid == uuid
    return found


def test_the_tool_and_cuda_agree() -> None:
    gpu, cuda = first(), torch.cuda.get_device_properties(0)
    assert gpu.name == cuda.name
    assert gpu.compute_capability == f"{cuda.major}.{cuda.minor}"
    assert gpu.memory_bytes is not None
    assert 0 <= gpu.memory_bytes - cuda.total_memory < 0.05 * gpu.memory_bytes, (
        "the driver keeps some"
    )
    visible = [one.uuid for one in visible_gpus(os.environ)]
    assert len(visible) == torch.cuda.device_count()
    assert gpu.uuid == visible[0]
    pairs = {
        frozenset((one, other))
        for one in visible
        for other in visible
        if one and other and one < other
    }
    assert pairs <= gpu_links(os.environ).keys()


def test_a_data_centres_gpu_tells_what_doctor_judges() -> None:
    findings = {found.topic: found for found in examine_here(os.environ)}
    print(render(list(findings.values())))
    for topic in (
        "gpu driver",
        "gpu processes",
        "gpu clocks",
        "gpu power",
        "gpu memory",
        "gpu pcie",
        "gpu persistence",
    ):
        assert findings[topic].found != UNKNOWN, topic
    gpu = first()
    assert None not in (
        gpu.slowed_by,
        gpu.temperature_celsius,
        gpu.errors_uncorrected,
        gpu.remap_failed,
        gpu.mig,
    )


def test_a_busy_gpu_has_its_clocks_up_and_its_memory_in_use() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(2.0)  # utilisation is of the last second
    busy = first()
    ended.set()
    thread.join()
    assert busy.sm_clock is not None
    assert busy.sm_clock_max is not None
    assert 0.5 * busy.sm_clock_max < busy.sm_clock <= busy.sm_clock_max
    assert (busy.memory_used_bytes or 0) >= a.nbytes
    assert (busy.utilization_percent or 0) > 0
    assert "idle" not in (busy.slowed_by or ())


RANK = """
import os, torch, msgspec
from parbench.bench.rank.worker import _hello
told = [_hello("", on_cuda=False)]
assert not torch.cuda.is_initialized(), "a rank on the CPU began CUDA"
told.append(_hello("", on_cuda=True))
print(msgspec.json.encode([[one.place.gpu, one.environment] for one in told]).decode())
"""


def test_a_rank_tells_its_gpu_and_on_the_cpu_leaves_it_alone() -> None:
    variables = {**environment(), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    told = subprocess.run(
        [sys.executable, "-c", RANK], env=variables, capture_output=True, text=True, check=True
    )
    (no_gpu, on_cpu), (uuid, on_cuda) = msgspec.json.decode(told.stdout)
    assert (no_gpu, on_cpu.get("gpu"), on_cpu["torch"].get("gpu")) == (None, None, None)
    assert uuid == on_cuda["gpu"]["uuid"] == first().uuid
    assert on_cuda["gpu"]["l2_cache_bytes"] >= 1 << 20
    assert on_cuda["load"]["gpu"]["processes"] == [], "another process is on this GPU"


def test_runs_keep_it_where_it_was_used(parbench: Command, tmp_path: Path) -> None:
    words = ["run", "--only", "all_reduce", "--sizes", "1K", "--launches", "1", "--budget", "10s"]
    kept = {}
    for device, ranks in (("cuda", ["--nproc", "1", "--allow-single"]), ("cpu", ["--nproc", "2"])):
        before = {*tmp_path.glob("runs/*")}
        done = parbench(*words, "--device", device, *ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        [path] = {*tmp_path.glob("runs/*")} - before
        kept[device] = msgspec.json.decode((path / "run.json").read_bytes())["environment"]
    assert kept["cuda"]["gpu"]["uuid"] == first().uuid
    assert kept["cuda"]["load"]["gpu"]["temperature_celsius"] > 0
    assert "gpu" not in kept["cpu"]
    assert "same GPU" not in kept["cpu"]["locality"].values()
