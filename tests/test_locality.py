"""How near ranks are, from what the system tells, and unknown where it does not."""

import os
from pathlib import Path

import pytest

from bench.locality import Place, gpu_links, parse_topology, parse_uuids, place, relation, relations

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
        (at(gpu="cc"), at(gpu="cc"), "same GPU"),
        (at(gpu="aa"), at(gpu="cc"), "NVLink"),
        (at(gpu="cc"), at(gpu="bb"), "other NUMA node"),
        (at(gpu="aa"), at(gpu="bb"), "PCIe"),
        (at(gpu="cc"), at(gpu="77"), None),
        (at(), at("b"), "other node"),
        (at(switches="spine.leaf1.a"), at("b", switches="spine.leaf1.b"), "same switch"),
        (at(switches="spine.leaf1.a"), at("b", switches="spine.leaf2.b"), "other node"),
        (at(switches="a"), at("b", switches="b"), "other node"),
    ],
)
def test_a_pair_is_as_near_as_the_system_tells(a: Place, b: Place, expected: str | None) -> None:
    links = {("aa", "cc"): "NVLink", ("bb", "cc"): "other NUMA node", ("aa", "bb"): "PCIe"}
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


UUIDS = "0, GPU-cc00-01\n1, GPU-aa00-02\n2, GPU-bb00-03\n"


def test_gpus_are_known_by_their_uuid_as_torch_writes_it() -> None:
    assert parse_uuids(UUIDS) == {0: "cc00-01", 1: "aa00-02", 2: "bb00-03"}
    assert parse_uuids("No devices were found\n") == {}


@pytest.mark.parametrize("uuids", [UUIDS, UUIDS.replace("2, GPU-bb00-03\n", "")])
def test_links_are_between_uuids_for_a_rank_counts_only_the_gpus_it_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uuids: str
) -> None:
    """Each rank sees one GPU, its first; what nvidia-smi gives no UUID of has no link."""
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "uuids").write_text(uuids)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$*" in\n"topo -m") cat {tmp_path}/topology;;\n')
    with smi.open("a") as file:
        file.write(f'"--query-gpu=index,uuid --format=csv,noheader") cat {tmp_path}/uuids;;\nesac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    links = gpu_links()
    one, two, three = (at(gpu=uuid) for uuid in ("cc00-01", "aa00-02", "bb00-03"))
    assert relation(one, two, links) == "NVLink"
    assert relation(one, three, links) == ("other NUMA node" if uuids is UUIDS else None)
    assert relation(one, one, links) == "same GPU"


def test_without_the_tool_there_are_no_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_links() == {}
