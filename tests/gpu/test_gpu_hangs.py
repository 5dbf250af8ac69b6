"""Hangs on a GPU: the culprit, what remains of it, and what torch records about NCCL."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from parbench.bench.launch.flight_recorder import GroupState, parse_groups
from parbench.bench.machine.gpu import read_report
from parbench.bench.results.records import read_records
from parbench.bench.world import accelerator
from parbench.bench.world.torch_compat import (
    dump_flight_records,
)
from parbench.bench.world.world import World
from tests.gpu.conftest import NCCL_TIMEOUT_SECONDS
from tests.support.paths import Command, environment

pytestmark = pytest.mark.gpu
RUN = "--preset smoke --budget 60s --repetitions 1 --timeout 10s --device cuda --set at=8,-1"
ONE_RANK = "--nproc 1 --set rank=0"
TWO_RANKS = "--backend gloo --nproc 2"
MAX_LEFT_BYTES = 256 << 20
SPIN_CYCLES = 8 * 10**9
"""Some seconds of a spinning kernel."""


def read_used_bytes() -> int:
    return sum(gpu.memory_used_bytes or 0 for gpu in read_report(os.environ).gpus)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (f"{ONE_RANK} tests.support.faults:spinning", "no rank is known to be missing"),
        (
            f"{ONE_RANK} tests.support.faults:spinning --set synchronizes=false",
            "no rank is known to be missing",
        ),
        (f"{TWO_RANKS} tests.support.faults:asleep", "rank 1 did not arrive"),
        (f"{TWO_RANKS} tests.support.faults:spinning", "rank 1 did not arrive"),
    ],
)
def test_hang_is_explained_and_next_case_runs(
    parbench: Command, tmp_path: Path, options: str, reason: str
) -> None:
    used_before = read_used_bytes()
    parbench("run", *RUN.split(), *options.split())
    [file] = tmp_path.glob("runs/*Z-*/records.jsonl")
    hang, following = read_records(file)
    assert hang.status == "hang"
    assert reason in hang.reason
    stack = hang.ranks[-1].stack
    assert "faults.py" in stack or "synchronize" in stack
    assert following.status == "ok"
    assert read_used_bytes() < used_before + MAX_LEFT_BYTES


def read_group(world: World, start_ns: int) -> GroupState:
    """Return the entries of the flight recorder about the group of the world since a time."""
    groups, dumps = dump_flight_records()
    return parse_groups(dumps, groups, start_ns)[world.group.group_name]


def test_flight_recorder_counts_done_and_pending(nccl_world: World) -> None:
    start_ns = time.time_ns()
    data = torch.ones(1 << 10, device="cuda")
    for _ in range(3):
        dist.all_reduce(data, group=nccl_world.group)
    torch.cuda.synchronize()
    done = read_group(nccl_world, start_ns)
    assert done.pending == 0
    assert done.enqueued >= 3

    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    dist.all_reduce(data, group=nccl_world.group)
    time.sleep(1.0)
    read_start = time.perf_counter()
    busy = read_group(nccl_world, start_ns)
    assert time.perf_counter() - read_start < 1.0, "reading waited for the GPU"
    assert busy.enqueued == busy.pending == done.enqueued + 1
    torch.cuda.synchronize()
    assert read_group(nccl_world, start_ns).pending == 0


def test_flight_recorder_completes_coalesced_calls(nccl_world: World) -> None:
    start_ns = time.time_ns()
    data = torch.ones(1 << 10, device="cuda")
    group, device = nccl_world.group, nccl_world.device
    with distributed_c10d._coalescing_manager(group=group, device=device):
        dist.all_reduce(data, group=nccl_world.group)
        dist.all_reduce(data, group=nccl_world.group)
    torch.cuda.synchronize()
    time.sleep(1.0)
    assert read_group(nccl_world, start_ns).pending == 0


def test_every_nccl_group_has_the_timeout(nccl_world: World) -> None:
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("outer", "inner"))
    for group in (nccl_world.group, dist.new_group(), *mesh.get_all_groups()):
        timeout = group._get_backend(nccl_world.device).options._timeout
        assert timeout == timedelta(seconds=NCCL_TIMEOUT_SECONDS)


def test_nccl_version_equals_flight_recorder(nccl_world: World) -> None:
    dist.all_reduce(torch.ones(1, device="cuda"), group=nccl_world.group)
    recorded = [json.loads(dump)["comm_lib_version"] for dump in dump_flight_records()[1]]
    assert accelerator.find_library_version() in recorded


TF32_SCRIPT = """
import torch
from parbench.bench.world.world import disable_tf32
a = torch.randn(1024, 1024, dtype=torch.float64, device="cuda")
exact = a @ a

def compute_error():
    return float(((a.float() @ a.float()).double() - exact).abs().max() / exact.abs().max())

print(compute_error(), disable_tf32(), compute_error())
"""


def test_float32_is_not_tf32() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", TF32_SCRIPT],
        env={**environment(), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    tf32_error, precision, float32_error = completed.stdout.split()
    assert precision == "highest"
    assert float(float32_error) < 1e-5 < float(tf32_error)
