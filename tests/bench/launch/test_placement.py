"""Warnings where ranks are not where they were asked to be."""

from typing import Any

import pytest
from msgspec.structs import replace

from parbench.bench.launch.messages import Hello
from parbench.bench.launch.recorder import find_misplacements
from parbench.bench.machine.environment import RankPlace
from parbench.bench.machine.slurm_allocation import NodeLayout


def make_hellos(hosts: str, *cpus: tuple[int, ...]) -> list[Hello]:
    """Return the hellos of ranks on hosts with names of one letter, promised two CPUs each."""
    hellos = []
    for rank, host in enumerate(hosts):
        own_cpus = cpus[rank] if cpus else (0, 1)
        hello = Hello(
            rank=rank,
            host=host,
            pid=1,
            environment={"variables": {"SLURM_CPUS_PER_TASK": "2"}},
            place=RankPlace(host=host, cpus=own_cpus, numa_nodes=(0,)),
        )
        hellos.append(hello)
    return hellos


@pytest.mark.parametrize(
    ("distribution", "hosts", "fact"),
    [
        ("block", "abab", "ranks are on a, b, a, b"),
        ("cyclic", "abba", "ranks are on a, b, b, a"),
        ("block", "aaab", "3 on a, 1 on b"),
        ("block", "bbaa", ""),
        ("cyclic", "baba", ""),
    ],
)
def test_unexpected_distribution_is_reported(distribution: Any, hosts: str, fact: str) -> None:
    layout = NodeLayout(nodes=2, ntasks_per_node=2, distribution=distribution)
    warnings = find_misplacements(layout, make_hellos(hosts))
    assert len(warnings) == bool(fact)
    assert fact in " ".join(warnings)


def test_cores_far_from_the_gpu_are_reported() -> None:
    hellos = make_hellos("aaaa")
    for rank, node in enumerate((0, 1, None, 1)):
        place = replace(hellos[rank].place, gpu_numa_node=node)
        hellos[rank] = replace(hellos[rank], place=place)
    [warning] = find_misplacements(None, hellos)
    assert warning.startswith("ranks 1,3: the CPUs are in another NUMA node than the GPU")
    assert find_misplacements(None, hellos[:1]) == []


def test_missing_and_shared_cpus_are_reported() -> None:
    hellos = make_hellos("aabb", (3,), (3,), (0, 1), (2, 3))
    layout = NodeLayout(nodes=2, ntasks_per_node=2)
    first, second, shared = find_misplacements(layout, hellos)
    assert first == "rank 0 on a may use CPUs 3; SLURM_CPUS_PER_TASK is 2"
    assert second.startswith("rank 1 on a")
    assert shared == "2 ranks share CPU 3 of a"
