"""How near ranks are, from what the system tells, and unknown where it does not."""

import os
from pathlib import Path

import pytest

from bench.locality import Place, gpu_links, parse_topology, place, relation, relations

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def at(host: str = "a", cpus: tuple[int, ...] = (0, 1), numa: tuple[int, ...] = (0,), **more: object) -> Place:
    return Place(host=host, cpus=cpus, numa_nodes=numa, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (at(cpus=(3,)), at(cpus=(3,)), "same core"),
        (at(), at(cpus=(2, 3)), "same NUMA node"),
        (at(), at(numa=(1,)), "other NUMA node"),
        (at(), at(numa=(0, 1)), None),
        (at(numa=()), at(numa=()), None),
        (at(gpu=0), at(gpu=0), "same GPU"),
        (at(gpu=1), at(gpu=0), "NVLink"),
        (at(gpu=0), at(gpu=2), "other NUMA node"),
        (at(gpu=1), at(gpu=2), "PCIe"),
        (at(gpu=0), at(gpu=7), None),
        (at(), at("b"), "other node"),
        (at(switches="spine.leaf1.a"), at("b", switches="spine.leaf1.b"), "same switch"),
        (at(switches="spine.leaf1.a"), at("b", switches="spine.leaf2.b"), "other node"),
        (at(switches="a"), at("b", switches="b"), "other node"),
    ],
)
def test_a_pair_is_as_near_as_the_system_tells(a: Place, b: Place, expected: str | None) -> None:
    links = parse_topology(TOPOLOGY)
    assert relation(a, b, links) == relation(b, a, links) == expected


def test_the_gpu_matrix_is_read_without_nics_and_colours() -> None:
    assert parse_topology(TOPOLOGY) == {(0, 1): "NVLink", (0, 2): "other NUMA node", (1, 2): "PCIe"}


def test_every_pair_is_named_once_and_a_large_world_is_left_out() -> None:
    assert relations([at(), at(), at("b")], {}) == {
        "0-1": "same NUMA node",
        "0-2": "other node",
        "1-2": "other node",
    }
    assert relations([at()] * 65, {}) == {}


def test_this_process_has_a_place(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/node"
    for node, cpus in ((0, "0-1023"), (1, "2000-2001")):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    here = place("a", {"SLURM_TOPOLOGY_ADDR": "s.a"}, None, tmp_path)
    assert here.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert here.numa_nodes == (0,)
    assert here.switches == "s.a"


def test_without_the_tool_there_are_no_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_links() == {}
