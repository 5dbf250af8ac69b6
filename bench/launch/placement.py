"""The hosts, cores and GPUs of ranks, and ranks that are not placed as requested. Without torch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from parbench.bench.launch.messages import Hello
from parbench.bench.machine.environment import format_cpus
from parbench.bench.machine.slurm_allocation import NodeLayout


def describe_hosts(hellos: Sequence[Hello]) -> dict[str, Any]:
    """Return each rank's host and switch path in rank order; nothing if all share one host."""
    hosts = [hello.host for hello in hellos]
    if len(set(hosts)) == 1:
        return {}
    switches = {hello.host: hello.place.switches for hello in hellos if hello.place.switches}
    return {"hosts": hosts, **({"switches": switches} if switches else {})}


def find_misplacements(layout: NodeLayout, hellos: Sequence[Hello]) -> list[str]:
    """Return a warning for each way in which ranks are not where the layout places them."""
    return [*_check_nodes(layout, hellos), *_check_cpus(hellos)]


def _check_nodes(layout: NodeLayout, hellos: Sequence[Hello]) -> list[str]:
    hosts = [hello.host for hello in hellos]
    counts = Counter(hosts)
    per_node = layout.ntasks_per_node
    if len(counts) != layout.nodes or set(counts.values()) != {per_node}:
        actual = ", ".join(f"{count} on {host}" for host, count in counts.items())
        return [
            f"{layout.nodes} nodes with {per_node} ranks each were asked for; there are {actual}"
        ]
    expected = list(counts) * per_node
    if layout.distribution == "block":
        expected = [host for host in counts for _ in range(per_node)]
    if hosts != expected:
        return [
            f"distribution {layout.distribution} was asked for; ranks are on {', '.join(hosts)}"
        ]
    return []


def _check_cpus(hellos: Sequence[Hello]) -> list[str]:
    warnings = []
    single_cpus: Counter[tuple[str, int]] = Counter()
    for hello in hellos:
        cpus = hello.place.cpus
        promised = str(hello.environment.get("variables", {}).get("SLURM_CPUS_PER_TASK", ""))
        if promised.isdecimal() and len(cpus) < int(promised):
            allowed = f"rank {hello.rank} on {hello.host} may use CPUs {format_cpus(cpus)}"
            warnings.append(f"{allowed}; SLURM_CPUS_PER_TASK is {promised}")
        if len(cpus) == 1:
            single_cpus[hello.host, cpus[0]] += 1
    shared = [
        f"{n} ranks share CPU {cpu} of {host}" for (host, cpu), n in single_cpus.items() if n > 1
    ]
    return warnings + shared
