"""A rank that sleeps and a GPU that spins: who is blamed, what is left of them, and what torch records of NCCL."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from parbench.bench.launch.flight_recorder import GroupSeen, groups_seen
from parbench.bench.machine.gpu import gpus_of
from parbench.bench.results.records import Record, read_records
from parbench.bench.world.torch_compat import coalescing, nccl_version, recorded_work
from parbench.bench.world.world import World, open_world
from tests.support.paths import Command, environment

pytestmark = pytest.mark.gpu

ONE = ("--device", "cuda", "--nproc", "1", "--allow-single", "--set", "rank=0")
TWO = ("--device", "cuda", "--backend", "gloo", "--nproc", "2")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Be the only rank of an NCCL world whose collectives may take 30 s."""
    store = HashStore()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with open_world("nccl", "cuda", 1, 30.0, store) as world:
        yield world


def run(parbench: Command, folder: Path, *words: str) -> list[Record]:
    """Run two cases of a fault, the second of which is fine, and return their records."""
    run = ("run", "--preset", "smoke", "--budget", "60s", "--launches", "1", "--timeout", "10s")
    parbench(*run, "--set", "at=8,-1", *words)
    [path] = (folder / "runs").iterdir()
    return list(read_records(path / "records.jsonl"))


def in_use() -> int:
    return sum(gpu.memory_used_bytes or 0 for gpu in gpus_of(os.environ))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (*ONE, "--target", "tests.support.faults:asleep"),
            "every rank is in code of its own; see their stacks",
        ),
        (
            (*ONE, "--target", "tests.support.faults:spinning"),
            "every rank arrived and waits; see their stacks",
        ),
        (
            (*ONE, "--target", "tests.support.faults:spinning", "--set", "synchronizes=false"),
            "every rank has enqueued nccl:all_reduce, which is not done; see their stacks",
        ),
        ((*TWO, "--target", "tests.support.faults:asleep"), "rank 1 did not arrive"),
        ((*TWO, "--target", "tests.support.faults:spinning"), "rank 1 did not arrive"),
    ],
)
def test_a_hang_has_its_reason_its_gpu_is_free_again_and_the_next_case_runs(
    parbench: Command, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    before = in_use()
    hang, after = run(parbench, tmp_path, *words)
    assert (hang.status, hang.reason) == ("hang", f"no end within 10 s: {told}")
    late = hang.ranks[-1]
    assert "mischief" in late.stack or "faults.py" in late.stack or "synchronize" in late.stack, (
        late.stack
    )
    assert (after.status, after.notes) == (
        "ok",
        [note for note in after.notes if "were ended" not in note],
    )
    assert in_use() < before + (256 << 20)


def now(world: World, since: int) -> GroupSeen:
    groups, dumps = recorded_work()
    found = groups_seen(dumps, groups, since, time.time_ns())
    assert found is not None
    return found[world.group.group_name]


def test_torchs_record_of_nccl_tells_what_is_enqueued_and_done(alone: World) -> None:
    since, data = time.time_ns(), torch.ones(1 << 10, device="cuda")
    for _ in range(3):
        dist.all_reduce(data, group=alone.group)
    torch.cuda.synchronize()
    done = now(alone, since)
    assert (done.pending, done.name, done.sends_to, done.receives_from) == (0, "", (), ())
    assert done.enqueued >= 3
    torch.cuda._sleep(8 * 10**9)  # type: ignore[no-untyped-call]  # some seconds
    dist.all_reduce(data, group=alone.group)
    time.sleep(1.0)
    began = time.perf_counter()
    busy = now(alone, since)
    assert time.perf_counter() - began < 1.0, "reading it waits for no GPU"
    assert (busy.enqueued, busy.pending, busy.name) == (
        done.enqueued + 1,
        done.enqueued + 1,
        "nccl:all_reduce",
    )
    torch.cuda.synchronize()
    assert now(alone, since).pending == 0
    with coalescing(alone.group, alone.device):
        dist.all_reduce(data, group=alone.group)
        dist.all_reduce(data, group=alone.group)
    torch.cuda.synchronize()
    time.sleep(1.0)
    assert now(alone, since).pending == 0, (
        "calls that are launched as one are done with their launch"
    )


def test_every_group_of_nccl_has_the_worlds_timeout(alone: World) -> None:
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("outer", "inner"))
    for group in (alone.group, dist.new_group(), *mesh.get_all_groups()):
        assert group._get_backend(alone.device).options._timeout == timedelta(seconds=30)


def test_the_nccl_that_is_loaded_is_told_and_is_the_recorders(alone: World) -> None:
    dist.all_reduce(torch.ones(1, device="cuda"), group=alone.group)
    recorded = [json.loads(dump)["comm_lib_version"] for dump in recorded_work()[1]]
    assert nccl_version() in recorded


def test_float32_products_are_no_tf32_where_the_environment_asks_for_it() -> None:
    code = """
import torch
from parbench.bench.world.world import full_float32
a = torch.randn(1024, 1024, dtype=torch.float64, device="cuda")
error = lambda: float(((a.float() @ a.float()).double() - a @ a).abs().max() / (a @ a).abs().max())
print(error(), full_float32(), error())
"""
    variables = {**environment(), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    rough, told, fine = done.stdout.split()
    assert told == "highest"
    assert float(fine) < 1e-5 < float(rough)
