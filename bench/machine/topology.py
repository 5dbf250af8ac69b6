"""How near two ranks are: same core, NUMA node, NVLink, PCIe, switch, or another node; unknown where nothing tells.

``place`` is read by each rank of itself; ``relation`` compares two of them, without torch.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.machine.environment import parse_cpus
from bench.machine.machine import affinity, contents

MAX_RANKS = 64
_TOPO_SECONDS = 10
_UUIDS = ("--query-gpu=index,uuid", "--format=csv,noheader")
_LINKS = {"PIX": "PCIe", "PXB": "PCIe", "PHB": "PCIe", "NODE": "PCIe", "SYS": "other NUMA node"}

Links = Mapping[tuple[str, str], str]
"""How GPUs are joined, by their UUIDs in order."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: CPUs it may use, their NUMA nodes, its GPU's UUID if any, its switch path under SLURM."""

    host: str
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    gpu: str | None = None
    switches: str | None = None


def rank_place(host: str, environ: Mapping[str, str], gpu: str | None, root: Path = Path("/")) -> RankPlace:
    cpus = affinity()
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    own = [folder.name for folder in folders if cpus & parse_cpus(contents(folder / "cpulist") or "")]
    return RankPlace(
        host=host,
        cpus=tuple(sorted(cpus)),
        numa_nodes=tuple(int(name.removeprefix("node")) for name in own),
        gpu=gpu,
        switches=environ.get("SLURM_TOPOLOGY_ADDR"),
    )


def relations(places: Sequence[RankPlace], links: Links) -> dict[str, str | None]:
    """Return the relation of each pair of ranks, as ``0-1``; nothing for more than 64 ranks, whose table none reads."""
    n = len(places)
    if n > MAX_RANKS:
        return {}
    return {f"{a}-{b}": relation(places[a], places[b], links) for a in range(n) for b in range(a + 1, n)}


def relation(a: RankPlace, b: RankPlace, links: Links) -> str | None:
    if a.host != b.host:
        # switch paths such as spine.leaf1.n1: the last part is the node itself
        switches = [(place.switches or "").rpartition(".")[0] for place in (a, b)]
        return "same switch" if switches[0] == switches[1] != "" else "other node"
    if a.gpu is not None and b.gpu is not None:
        return "same GPU" if a.gpu == b.gpu else links.get(_pair(a.gpu, b.gpu))
    if len(a.cpus) == 1 and a.cpus == b.cpus:
        return "same core"
    if len(a.numa_nodes) != 1 or len(b.numa_nodes) != 1:
        return None  # free to move between NUMA nodes, or no NUMA node is shown
    return "same NUMA node" if a.numa_nodes == b.numa_nodes else "other NUMA node"


def gpu_links() -> dict[tuple[str, str], str]:
    """Return how this host's GPUs are joined, as nvidia-smi tells; empty where it does not.

    Ranks know their GPU by its UUID, for they count only those that are visible to them, and nvidia-smi counts all.
    """
    uuids = parse_uuids(_told(*_UUIDS))
    found = parse_topology(_told("topo", "-m"))
    return {_pair(uuids[a], uuids[b]): link for (a, b), link in found.items() if a in uuids and b in uuids}


def parse_uuids(text: str) -> dict[int, str]:
    """Return GPUs' UUIDs by index from lines such as ``0, GPU-8f2b...``, without nvidia-smi's prefix, as torch does."""
    rows = re.findall(r"^\s*(\d+)\s*,\s*(?:GPU-)?(\S+)\s*$", text, re.MULTILINE)
    return {int(index): uuid for index, uuid in rows}


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the links in nvidia-smi's matrix, by index: NV# is NVLink, SYS crosses NUMA nodes, the rest is PCIe."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    found = {}
    num_gpus = sum(1 for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row)
    for row in rows:
        match = re.fullmatch(r"GPU(\d+)", row[0]) if row else None
        if match is None:
            continue
        for column, word in enumerate(row[1 : num_gpus + 1]):
            link = "NVLink" if re.fullmatch(r"NV\d+", word) else _LINKS.get(word)
            if link is not None and int(match[1]) < column:
                found[int(match[1]), column] = link
    return found


def _told(*words: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=_TOPO_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _pair(a: str, b: str) -> tuple[str, str]:
    return min(a, b), max(a, b)
