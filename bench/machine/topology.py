"""How near two ranks are: same core, NUMA node, NVLink, PCIe, switch, or another node; unknown where nothing tells.

``place`` is read by each rank of itself; ``relation`` compares two of them, without torch.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from bench.machine.environment import parse_cpus
from bench.machine.machine import affinity, contents, nvidia_smi

_LINKS = {"PIX": "PCIe", "PXB": "PCIe", "PHB": "PCIe", "NODE": "PCIe", "SYS": "other NUMA node"}

Links = Mapping[frozenset[str], str]  # how two GPUs are joined, by their UUIDs


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: CPUs it may use, their NUMA nodes, its GPU's UUID if any, its switch path under SLURM."""

    host: str
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    gpu: str | None = None
    switches: str | None = None


def rank_place(host: str, environ: Mapping[str, str], gpu: str | None, root: Path = Path("/")) -> RankPlace:
    cpus, folders = affinity(), (root / "sys/devices/system/node").glob("node[0-9]*")
    near = (folder.name for folder in folders if cpus & parse_cpus(contents(folder / "cpulist") or ""))
    nodes = [int(name.removeprefix("node")) for name in near]
    switches = environ.get("SLURM_TOPOLOGY_ADDR")
    return RankPlace(host=host, cpus=tuple(sorted(cpus)), numa_nodes=tuple(sorted(nodes)), gpu=gpu, switches=switches)


def relations(places: Sequence[RankPlace], links: Links) -> dict[str, str | None]:
    """Return the relation of each pair of ranks, as ``0-1``; nothing for more than 64 ranks, whose table none reads."""
    if len(places) > 64:
        return {}
    return {f"{a}-{b}": relation(one, other, links) for (a, one), (b, other) in combinations(enumerate(places), 2)}


def relation(a: RankPlace, b: RankPlace, links: Links) -> str | None:
    if a.host != b.host:
        # switch paths such as spine.leaf1.n1: the last part is the node itself
        one, other = ((place.switches or "").rpartition(".")[0] for place in (a, b))
        return "same switch" if one == other != "" else "other node"
    if a.gpu is not None and b.gpu is not None:
        return "same GPU" if a.gpu == b.gpu else links.get(frozenset((a.gpu, b.gpu)))
    if len(a.cpus) == 1 and a.cpus == b.cpus:
        return "same core"
    if len(a.numa_nodes) != 1 or len(b.numa_nodes) != 1:
        return None  # free to move between NUMA nodes, or no NUMA node is shown
    return "same NUMA node" if a.numa_nodes == b.numa_nodes else "other NUMA node"


def gpu_links() -> dict[frozenset[str], str]:
    """Return how this host's GPUs are joined, as nvidia-smi tells; empty where it does not."""
    # by UUIDs, as torch writes them: ranks count only the GPUs that are visible to them, and nvidia-smi counts all
    listed = nvidia_smi(os.environ, "--query-gpu=index,uuid", "--format=csv,noheader")
    rows = re.findall(r"^\s*(\d+)\s*,\s*(?:GPU-)?(\S+)\s*$", listed, re.MULTILINE)
    uuids = {int(index): uuid for index, uuid in rows}
    # in nvidia-smi's matrix NV# is NVLink, SYS crosses NUMA nodes, the rest is PCIe
    matrix = re.sub(r"\x1b\[[\d;]*m", "", nvidia_smi(os.environ, "topo", "-m"))
    rows = re.findall(r"^\s*GPU(\d+)(.*\bX\b.*)$", matrix, re.MULTILINE)
    found = {}
    for index, words in rows:
        for column, word in enumerate(words.split()[: len(rows)]):
            link = "NVLink" if re.fullmatch(r"NV\d+", word) else _LINKS.get(word)
            if link is not None and int(index) < column and {int(index), column} <= uuids.keys():
                found[frozenset((uuids[int(index)], uuids[column]))] = link
    return found
