"""Ranks send the UUIDs of their GPUs, and the first rank of each other host a report."""

from pathlib import Path
from typing import Any

import pytest

from parbench.bench.machine.gpu import Gpu, GpuReport
from parbench.bench.machine.gpu_inventory import GpuInventory, capture_gpu
from tests.support.nvidia import H100, format_uuid, gpus, install

LOCAL = Gpu(name="H100", uuid="local", memory_bytes=80, memory_used_bytes=30)


def test_facts_of_the_drivers_host_are_added() -> None:
    sent: dict[str, Any] = {"gpu": {"uuid": "local", "l2_cache_bytes": 5}, "host": {}}
    inventory = GpuInventory(GpuReport(gpus=(LOCAL,), links=(("local", "b", "NVLink"),)))
    [complete] = inventory.add_facts([sent])
    assert complete["gpu"]["memory_bytes"] == 80
    assert complete["gpu"]["l2_cache_bytes"] == 5
    assert "memory_used_bytes" not in complete["gpu"], "the environment does not vary"
    assert inventory.links == {frozenset(("local", "b")): "NVLink"}


def test_rank_without_a_known_gpu_keeps_its_environment() -> None:
    environments: list[dict[str, Any]] = [{"host": {}}, {"gpu": {"uuid": "unknown"}}]
    assert GpuInventory(GpuReport()).add_facts(environments) == environments


@pytest.mark.parametrize(
    ("local_rank", "size", "is_sent"),
    [
        ("0", "4", True),
        ("1", "4", False),
        ("0", "2", False),
    ],
)
def test_first_rank_of_one_of_several_hosts_reports_its_gpus(
    tmp_path: Path, local_rank: str, size: str, is_sent: bool
) -> None:
    variables = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": size}
    environ = {**install(tmp_path, gpus(H100, 2)), **variables}
    sent = capture_gpu(environ, format_uuid(1))
    inventory = GpuInventory(GpuReport())
    [complete] = inventory.add_facts([sent])
    assert complete["gpu"]["uuid"] == format_uuid(1)
    assert ("memory_bytes" in complete["gpu"]) is is_sent
    # A later repetition sends no report.
    [later] = inventory.add_facts([{"gpu": {"uuid": format_uuid(1)}}])
    assert ("memory_bytes" in later["gpu"]) is is_sent
