"""Where a run's ranks ran: their hosts, switches and cores, and how near two of them are. Pure.

What ranks do not share stands in the records' environment under ``rank N``, what they share in the run's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.machine.environment import format_cpus
from bench.results.runs import Run
from reports import cells

WITHIN, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE = "within a node", "same switch", "other switch", "other node"
NEAREST_FIRST = (WITHIN, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE)
BLOCK, CYCLIC, ONE_EACH, UNEVEN = "block", "cyclic", "one rank a node", "uneven"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a run on several nodes, by rank; ``asked`` is the placement that was asked for, or empty.

    ``switches`` are the paths above a host, by host, and ``affinities`` the cores of a rank, both where they are known;
    ``near`` holds the pairs of ranks that are told to be under one switch.
    """

    hosts: tuple[str, ...]
    asked: str = ""
    job: str = ""
    switches: Mapping[str, str]
    affinities: Mapping[int, str]
    near: frozenset[tuple[int, int]] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts, those under one switch side by side, else by their first rank."""
        first = list(dict.fromkeys(self.hosts))
        above = list(dict.fromkeys(self.switches.get(host, "") for host in first))
        return tuple(sorted(first, key=lambda host: above.index(self.switches.get(host, ""))))

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(rank for rank, name in enumerate(self.hosts) if name == host)

    def ordered(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks node by node; those without a host, which no run should have, last."""
        known = [rank for host in self.names for rank in self.ranks_on(host) if rank in set(ranks)]
        return (*known, *(rank for rank in ranks if rank not in set(known)))

    @property
    def placement(self) -> str:
        """How ranks lie on nodes, as found: block, cyclic, one rank a node, or uneven."""
        return placement_of(self.hosts)

    def distance(self, a: int, b: int) -> str:
        """Return how near two ranks are; switches are told apart only where the run knows of any."""
        if self.hosts[a] == self.hosts[b]:
            return WITHIN
        one, other = self.switches.get(self.hosts[a]), self.switches.get(self.hosts[b])
        if (min(a, b), max(a, b)) in self.near or (one and one == other):
            return SAME_SWITCH
        return OTHER_SWITCH if self.near or (one and other) else OTHER_NODE


def placement_of(hosts: Sequence[str]) -> str:
    """Return how ranks lie on nodes: each node's in a row, dealt out in turns, one each, or neither."""
    names = list(dict.fromkeys(hosts))
    each = {hosts.count(name) for name in names}
    if each == {1}:
        return ONE_EACH
    if len(each) == 1 and list(hosts) == [names[rank % len(names)] for rank in range(len(hosts))]:
        return CYCLIC
    return BLOCK if list(hosts) == sorted(hosts, key=names.index) else UNEVEN


def nodes_of(run: Run) -> Nodes | None:
    """Return where the ranks ran; None where all are on one host, or the run does not tell."""
    environment = run.info.environment or {}
    ranks = _ranks(run)
    hosts = _hosts(environment, ranks, run.info.plan.nproc)
    if len(set(hosts)) < 2:
        return None
    slurm = _mapping(environment.get("slurm"))
    return Nodes(
        hosts=hosts,
        asked=_word(slurm.get("placement")),
        job=_word(slurm.get("job")),
        switches=_switches(environment.get("switches") or slurm.get("switches"), hosts, ranks),
        affinities=_affinities(environment, ranks, len(hosts)),
        near=_near(_mapping(environment.get("locality")), len(hosts)),
    )


def ranks_words(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: ``0-3,8``."""
    return format_cpus(ranks)


def _ranks(run: Run) -> dict[int, Mapping[str, Any]]:
    """Return what each rank has of its own, as the first record that tells says."""
    for record in run.records:
        own = {name: part for name, part in record.environment.items() if name.startswith("rank ")}
        if own:
            numbers = {name.removeprefix("rank "): part for name, part in own.items()}
            return {int(number): _mapping(part) for number, part in numbers.items() if number.isdecimal()}
    return {}


def _hosts(environment: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], nproc: int) -> tuple[str, ...]:
    """Return each rank's host: listed, or what each calls itself; empty unless all are known."""
    listed = environment.get("hosts")
    if isinstance(listed, list | tuple):
        return tuple(listed) if all(isinstance(host, str) and host for host in listed) else ()
    own = [_word(_mapping(ranks.get(rank, {}).get("host")).get("name")) for rank in range(nproc)]
    return tuple(own) if all(own) else ()


def _switches(told: object, hosts: Sequence[str], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return the path above each host, from a list by rank, a mapping by host, or what ranks saw themselves.

    A path such as ``spine.leaf1.n1`` ends with the node itself, which is left out.
    """
    by_rank: list[object]
    if isinstance(told, list | tuple):
        by_rank = list(told)
    elif isinstance(told, Mapping):
        by_rank = [told.get(host) for host in hosts]
    else:
        own = (_mapping(ranks.get(rank, {}).get("variables")) for rank in range(len(hosts)))
        by_rank = [variables.get("SLURM_TOPOLOGY_ADDR") for variables in own]
    paths = {host: _above(path, host) for host, path in zip(hosts, by_rank, strict=False) if isinstance(path, str)}
    return {host: path for host, path in paths.items() if path}


def _above(path: str, host: str) -> str:
    """Return a path without the node at its end; one that names no node there is a switch's own."""
    rest, dot, last = path.rpartition(".")
    return rest if dot and last == host.partition(".")[0] else "" if path == host else path


def _affinities(
    environment: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], num_ranks: int
) -> dict[int, str]:
    shared = _mapping(environment.get("process")).get("affinity")
    own = {rank: _mapping(ranks.get(rank, {}).get("process")).get("affinity", shared) for rank in range(num_ranks)}
    return {rank: text for rank, value in own.items() if (text := _cores(value))}


def _cores(value: object) -> str:
    if isinstance(value, list | tuple) and all(isinstance(core, int) for core in value):
        return format_cpus(value)
    return _word(value)


def _near(locality: Mapping[str, Any], num_ranks: int) -> frozenset[tuple[int, int]]:
    found = set()
    for pair, kind in locality.items():
        a, _, b = str(pair).partition("-")
        if kind == SAME_SWITCH and a.isdecimal() and b.isdecimal() and max(int(a), int(b)) < num_ranks:
            found.add((min(int(a), int(b)), max(int(a), int(b))))
    return frozenset(found)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _word(value: object) -> str:
    return cells.visible(str(value)) if isinstance(value, str | int) else ""
