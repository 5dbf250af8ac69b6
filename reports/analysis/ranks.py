"""Where a run's ranks ran, how its repetitions went, and which rank comes late: hosts, switches and cores, time and
load.

What ranks do not share stands in the records' environment under ``rank N``, what they share in the run's.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parbench.bench.machine.environment import format_cpus
from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.formatting import to_single_line
from parbench.bench.results.records import Record, Stragglers
from parbench.bench.results.runs import Run
from parbench.bench.results.samples import load_rank_samples
from parbench.bench.results.stats import median
from parbench.bench.text import UserError, format_duration
from parbench.reports.analysis.summary import Row

WITHIN, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE = (
    "within a node",
    "same switch",
    "other switch",
    "other node",
)
NEAREST_FIRST = (WITHIN, SAME_SWITCH, OTHER_SWITCH, OTHER_NODE)
BLOCK, CYCLIC, ONE_EACH, UNEVEN = "block", "cyclic", "one rank a node", "uneven"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a run on several nodes, by rank; ``asked`` is the distribution that was asked for, or empty.

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
        return tuple(rank for rank, name in enumerate(self.hosts) if name == host)

    def ordered(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks node by node; those without a host, which no run should have, last."""
        every = (rank for host in self.names for rank in self.ranks_on(host))
        places = {rank: place for place, rank in enumerate(every)}
        return tuple(sorted(ranks, key=lambda rank: places.get(rank, len(places))))

    @cached_property
    def distribution(self) -> str:
        """The order of ranks on nodes: block, cyclic, one rank on each node, or uneven."""
        counts = Counter(self.hosts)
        names = list(counts)
        each = set(counts.values())
        in_turns = tuple(names[rank % len(names)] for rank in range(len(self.hosts)))
        if each == {1}:
            return ONE_EACH
        if len(each) == 1 and self.hosts == in_turns:
            return CYCLIC
        blocks = tuple(name for name in names for _ in range(counts[name]))
        return BLOCK if self.hosts == blocks else UNEVEN

    def distance(self, a: int, b: int) -> str:
        if self.hosts[a] == self.hosts[b]:
            return WITHIN
        one, other = self.switches.get(self.hosts[a]), self.switches.get(self.hosts[b])
        if (min(a, b), max(a, b)) in self.near or (one and one == other):
            return SAME_SWITCH
        return OTHER_SWITCH if self.near or (one and other) else OTHER_NODE


def nodes_of(run: Run) -> Nodes | None:
    """Return where the ranks ran; None where all are on one host, or the run does not tell."""
    environment = run.info.environment or {}
    own = next((told for record in run.records if (told := _of_ranks(record.environment))), {})
    listed = environment.get("hosts")
    if listed:
        hosts = tuple(host or "" for host in listed)
    else:
        hosts = tuple(
            _word(_at(own.get(rank), "host", "name")) for rank in range(run.info.plan.nproc)
        )
    if len(set(hosts)) < 2 or "" in hosts:
        return None
    shared = _at(environment, "process", "affinity")
    affinities = [_at(own.get(rank), "process", "affinity") for rank in range(len(hosts))]
    cores = {}
    for rank, mine in enumerate(affinities):
        told = shared if mine is None else mine
        cores[rank] = format_cpus(told) if isinstance(told, list) else _word(told)
    return Nodes(
        hosts=hosts,
        asked=_word(_at(environment, "slurm", "distribution")),
        job=_word(_at(environment, "slurm", "job")),
        switches=_switches(
            environment.get("switches") or _at(environment, "slurm", "switches"), hosts, own
        ),
        affinities={rank: text for rank, text in cores.items() if text},
        near=_near(environment.get("locality") or {}),
    )


def _of_ranks(environment: Mapping[str, Any]) -> dict[int, Any]:
    own = {
        name.removeprefix("rank "): part
        for name, part in environment.items()
        if name.startswith("rank ")
    }
    return {int(number): part for number, part in own.items() if number.isdecimal()}


def _switches(told: object, hosts: Sequence[str], own: Mapping[int, Any]) -> dict[str, str]:
    """Return the path above each host, from a list by rank, a mapping by host, or what ranks saw themselves.

    A path such as ``spine.leaf1.n1`` ends with the node itself, which is left out; one that does not is a switch's own.
    """
    by_rank: Sequence[object]
    if isinstance(told, list):
        by_rank = told
    elif isinstance(told, Mapping):
        by_rank = [told.get(host) for host in hosts]
    else:
        by_rank = [
            _at(own.get(rank), "variables", "SLURM_TOPOLOGY_ADDR") for rank in range(len(hosts))
        ]
    above = {}
    for host, path in zip(hosts, by_rank, strict=False):
        if isinstance(path, str) and path not in ("", host):
            rest, dot, last = path.rpartition(".")
            above[host] = rest if dot and last == host.partition(".")[0] else path
    return above


def _near(locality: Mapping[str, str]) -> frozenset[tuple[int, int]]:
    """Return the pairs of ranks, such as ``0-3``, whose hosts are on the same switch."""
    pairs = [pair.split("-") for pair, kind in locality.items() if kind == SAME_SWITCH]
    return frozenset((min(int(a), int(b)), max(int(a), int(b))) for a, b in pairs)


def _at(value: object, *names: str) -> Any:
    """Return what stands under these names, one inside the other; None where one is not there."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _word(value: object) -> str:
    return to_single_line(str(value)) if isinstance(value, str | int) else ""


@dataclass(frozen=True, kw_only=True)
class RepetitionLoad:
    """A repetition by its number from 1: its time (s), that of its measurements, and its host's load if known."""

    number: int
    seconds: float
    measuring_seconds: float
    load: HostLoad | None


def repetitions_of(run: Run) -> tuple[RepetitionLoad, ...]:
    """Return the repetitions in order, each with the load in which it measured longest; nothing of older runs."""
    found = []
    for number in sorted({one.repetition for one in run.info.repetitions}):
        parts = [one for one in run.info.repetitions if one.repetition == number]
        found.append(
            RepetitionLoad(
                number=number + 1,
                seconds=sum(one.seconds for one in parts),
                measuring_seconds=sum(
                    record.seconds for record in run.records if record.repetition == number
                ),
                load=max(parts, key=lambda one: one.seconds).load,
            )
        )
    return tuple(found)


def measuring_words(run: Run) -> str:
    took, whole = (
        sum(record.seconds for record in run.records),
        sum(one.seconds for one in run.info.repetitions),
    )
    share = (
        f"{100 * took / whole:.0f} % of {format_duration(whole)}"
        if whole
        else f"took {format_duration(took)}"
    )
    return f"measuring {share}"


def disturbed_words(run: Run) -> str:
    """Name the repetition beside which its host did most else, and in how many it did much; empty if in none."""
    repetitions = repetitions_of(run)
    disturbed = [(one, one.load) for one in repetitions if one.load and one.load.disturbance]
    if not disturbed:
        return ""
    worst, load = max(
        disturbed, key=lambda pair: (pair[1].other_cores or 0.0, pair[1].steal_percent or 0.0)
    )
    more = f" (much in {len(disturbed)} of {len(repetitions)})" if len(disturbed) > 1 else ""
    return f"in repetition {worst.number} {load.disturbance}{more}"


MOST_ROWS = 24


@dataclass(frozen=True, kw_only=True)
class Late:
    """A row with the median seconds by which each rank arrives after the first; no rank without readable samples."""

    row: Row
    arrival: Stragglers
    seconds_by_rank: Mapping[int, float]


def late_rows(run: Run, rows: Iterable[Row]) -> tuple[Late, ...]:
    """Return the rows with the largest skew that know who was late, in their own order."""
    arrivals = [
        (row, next((one.arrival for one in row.measured if one.arrival), None)) for row in rows
    ]
    known = [
        (skew, row, arrival)
        for row, arrival in arrivals
        if arrival and (skew := row.value("skew")) is not None
    ]
    kept = {row.case.id for _, row, _ in sorted(known, key=lambda one: -one[0])[:MOST_ROWS]}
    shown = [(row, arrival) for _, row, arrival in known if row.case.id in kept]
    return tuple(
        Late(row=row, arrival=arrival, seconds_by_rank=_lateness(run, row))
        for row, arrival in shown
    )


def _lateness(run: Run, row: Row) -> dict[int, float]:
    repetitions = defaultdict[int, list[float]](list)
    for record in row.measured:
        try:
            samples = load_rank_samples(run, record)
        except UserError:
            continue
        if "arrival_ns" in samples:
            late = (
                np.median(samples["arrival_ns"] - samples["arrival_ns"].min(axis=0), axis=1) / 1e9
            )
            for rank, seconds in zip(samples["ranks"].tolist(), late.tolist(), strict=True):
                repetitions[rank].append(seconds)
    return {rank: median(repetitions[rank]) for rank in sorted(repetitions)}


_MOST_OF, _OF_TIME, _BY_CHANCE = (
    0.5,
    0.1,
    0.07,
)  # five repetitions of two ranks that agree are 0.0625
_APART_SECONDS = 5e-4
_ALIKE = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)  # all ranks do the same
Vote = tuple[int, float, float]
"""A rank, by how many seconds it differs, and in which proportion."""


@dataclass(frozen=True, kw_only=True)
class Blame:
    """A rank that so many of the repetitions name, more often than chance makes; ``seconds`` and ``share`` are
    medians."""

    rank: int
    repetitions: int
    of_repetitions: int
    seconds: float
    share: float

    @property
    def words(self) -> str:
        return f"{self.repetitions} of {self.of_repetitions} repetitions"


def late_rank(rows: Sequence[Row]) -> Blame | None:
    """Return the rank that arrives last, for a tenth of the time or more and farther apart than a barrier leaves ranks.

    A barrier itself lets them go as far apart as a short operation takes.
    """
    transfers = [seconds for row in rows if (seconds := row.value("transfer"))]
    apart = min([_APART_SECONDS, *transfers]) if transfers else 0.0
    named = dict[int, list[Vote]]()
    for record, arrival, time in _arrivals(rows):
        skew = _value_of(record, "skew")
        if (
            arrival.late_rank is not None
            and (arrival.share or 0.0) > _MOST_OF
            and skew > max(_OF_TIME * time, apart)
        ):
            named.setdefault(record.repetition, []).append((arrival.late_rank, skew, skew / time))
    repetitions = {record.repetition for record, *_ in _arrivals(rows)}
    return agreed(named, len(repetitions), max((row.world.size for row in rows), default=1))


def last_out_rank(run: Run, rows: Iterable[Row]) -> Blame | None:
    """Return the rank that leaves last, by a tenth of the time or more, of what all ranks do alike."""
    named = dict[int, list[Vote]]()
    alike = [row for row in rows if row.case.short_name in _ALIKE or not row.is_communication]
    for record, arrival, time in _arrivals(alike):
        rank = arrival.last_out_rank if (arrival.last_out_share or 0.0) > _MOST_OF else None
        if rank is not None and (lag := _exit_lag(run, record, rank)) > _OF_TIME * time:
            named.setdefault(record.repetition, []).append((rank, lag, lag / time))
    repetitions = {record.repetition for record, *_ in _arrivals(alike)}
    return agreed(named, len(repetitions), max((row.world.size for row in alike), default=1))


def agreed(named: Mapping[int, Sequence[Vote]], repetitions: int, size: int) -> Blame | None:
    """Return the rank that repetitions name more often than chance makes (binomial), None if they name none so.

    A repetition names the rank that two thirds of the cases name, of those where any rank stands out.
    """
    votes = Counter[int]()
    for of in named.values():
        for rank, n in Counter(rank for rank, *_ in of).most_common(1):
            votes[rank] += 3 * n >= 2 * len(of)
    for rank, count in votes.most_common(1):
        others = range(count, repetitions + 1)
        chance = sum(math.comb(repetitions, k) * (size - 1) ** (repetitions - k) for k in others)
        if count and size * chance / size**repetitions <= _BY_CHANCE:
            own = [one for of in named.values() for one in of if one[0] == rank]
            seconds, share = (median([one[i] for one in own]) for i in (1, 2))
            return Blame(
                rank=rank,
                repetitions=count,
                of_repetitions=repetitions,
                seconds=seconds,
                share=share,
            )
    return None


def _arrivals(rows: Iterable[Row]) -> Iterator[tuple[Record, Stragglers, float]]:
    for row in rows:
        for one in row.measured:
            if one.arrival and (time := _value_of(one, row.headline)):
                yield one, one.arrival, time


def _value_of(record: Record, name: str) -> float:
    metric = record.metrics.get(name)
    return (metric and metric.value) or 0.0


def _exit_lag(run: Run, record: Record, rank: int) -> float:
    """Return by how many seconds a rank usually leaves after all others; zero or less if it does not, or none tells."""
    try:
        samples = load_rank_samples(run, record)
    except UserError:
        return 0.0
    ranks = list(samples.get("ranks", ()))
    if rank not in ranks or len(ranks) < 2 or "exit_ns" not in samples:
        return 0.0
    exits, place = samples["exit_ns"], ranks.index(rank)
    return float(np.median(exits[place] - np.delete(exits, place, axis=0).max(axis=0))) / 1e9
