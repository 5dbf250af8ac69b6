"""Where the ranks of an allocation really sit: told by themselves, held against what was asked."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.launch.messages import Hello
from bench.machine.environment import format_cpus
from bench.plan.plan import Spread


def seating(hellos: Sequence[Hello]) -> dict[str, Any]:
    """Return each rank's host and switch path in rank order; nothing where all share one host."""
    hosts = [hello.host for hello in hellos]
    if len(set(hosts)) < 2:
        return {}
    switches = {hello.host: hello.place.switches for hello in hellos if hello.place and hello.place.switches}
    return {"hosts": hosts, **({"switches": switches} if switches else {})}


def seating_doubts(spread: Spread, hellos: Sequence[Hello]) -> tuple[str, ...]:
    """Return in words where ranks sit otherwise than was asked: nodes, ranks on each, their order, their CPUs."""
    hosts = [hello.host for hello in hellos]
    return (*_placement_doubts(spread, hosts), *_affinity_doubts(hellos))


def _placement_doubts(spread: Spread, hosts: Sequence[str]) -> tuple[str, ...]:
    counts = Counter(hosts)
    names = list(counts)
    if len(names) != spread.nodes or set(counts.values()) != {spread.ntasks_per_node}:
        found = ", ".join(f"{count} on {host}" for host, count in counts.items())
        return (f"{spread.nodes} nodes with {spread.ntasks_per_node} ranks each were asked for; there are {found}",)
    asked = {
        "block": [name for name in names for _ in range(spread.ntasks_per_node)],
        "cyclic": names * spread.ntasks_per_node,
    }
    if list(hosts) == asked[spread.placement]:
        return ()
    return (f"placement {spread.placement} was asked for; ranks are on {', '.join(hosts)}",)


def _affinity_doubts(hellos: Sequence[Hello]) -> tuple[str, ...]:
    """Say which rank may use fewer CPUs than its task was promised, and which hosts have ranks on one core."""
    doubts = []
    for hello in hellos:
        promised = str(hello.environment.get("variables", {}).get("SLURM_CPUS_PER_TASK", ""))
        if hello.place and promised.isdecimal() and len(hello.place.cpus) < int(promised):
            doubts.append(
                f"rank {hello.rank} on {hello.host} may use CPUs {format_cpus(hello.place.cpus)}; "
                f"SLURM_CPUS_PER_TASK is {promised}"
            )
    alone = Counter((hello.host, hello.place.cpus) for hello in hellos if hello.place and len(hello.place.cpus) == 1)
    shared = [f"{count} ranks share CPU {cpus[0]} of {host}" for (host, cpus), count in alone.items() if count > 1]
    return (*doubts, *shared)
