"""The slow nodes and rails of a cluster, from the durations of exchanges in rounds of pairs.

An exchange is as slow as the slower of its two ends. The excess of an exchange is the logarithm of
its duration relative to the median of other pairs in its round and rail, because a whole round may
be slow. The excess of a rail of a node is the median over its partners, and that of a node the
median over its rails. The slowest node is set aside with its exchanges, and the others are compared
again, until none is slow; then the rails are. Most pairs must be fast, so at most about a quarter
of the nodes may be slow.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from parbench.bench.plan.groups import Pair

MIN_RATIO = 1.05
"""The smallest threshold: a node or rail with a smaller ratio of durations is never slow."""
_MIN_STANDARD_ERRORS = 3.0
"""The threshold in standard errors of the logarithm of a ratio."""
_MIN_PARTNERS = 2
"""The fewest other nodes with which a node must exchange data to be compared."""
_MAD_OF_NORMAL = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""
_VARIANCE_OF_MEDIAN = math.pi / 2
"""The variance of the median of normal values, relative to the variance of their mean."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of data between two nodes on one rail (a GPU and its NIC), and its duration."""

    round: int
    """The number of the round. All exchanges of a round happen at the same time."""
    nodes: Pair
    """The indices of the two nodes in ``Measurement.nodes``."""
    rail: int
    """The local rank on both nodes."""
    seconds: float
    """The median over repeated exchanges of the duration on the slower of both ranks."""


@dataclass(frozen=True)
class Endpoint:
    """A node, or one rail of a node."""

    node: int
    """The index of the node in ``Measurement.nodes``."""
    rail: int | None = None
    """The local rank, None for the whole node."""

    def has(self, exchange: Exchange) -> bool:
        """Return True if this node or rail takes part in the exchange."""
        return self.node in exchange.nodes and self.rail in (None, exchange.rail)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The duration of a node's or rail's exchanges, relative to exchanges between other nodes."""

    endpoint: Endpoint
    """The node or rail."""
    ratio: float
    """The duration of its exchanges over that of other exchanges in the same round and on its rail.

    Both durations are medians over exchanges. The ratio of a node is the median over its rails.
    """
    threshold: float
    """The ratio above which the node or rail counts as slow."""
    partners: tuple[int, ...]
    """The indices of the nodes with which data was exchanged."""
    num_exchanges: int
    """The number of exchanges of the node or rail from which the ratio was computed."""

    @property
    def is_slow(self) -> bool:
        """True if the ratio is above the threshold."""
        return self.ratio > self.threshold


def find_slow(exchanges: Iterable[Exchange]) -> list[Ratio]:
    """Return the ratios of the slow nodes, and of the slow rails of other nodes, slowest first.

    At most half of the nodes are returned, because they are compared with the other half.
    """
    remaining = list(exchanges)
    max_slow = len({node for exchange in remaining for node in exchange.nodes}) // 2
    slow: list[Ratio] = []
    while len({ratio.endpoint.node for ratio in slow}) < max_slow:
        slowest = _find_slowest(remaining)
        if slowest is None:
            break
        slow.append(slowest)
        remaining = [entry for entry in remaining if not slowest.endpoint.has(entry)]
    return slow


def confirm_slow(exchanges: Sequence[Exchange], suspects: Sequence[Ratio]) -> list[Ratio]:
    """Return new ratios of the nodes and rails that are slow in a second measurement too.

    ``suspects`` were slow in the first measurement, and ``exchanges`` are of the second. The new
    ratio of each ignores the exchanges of all other suspects.
    """
    confirmed = []
    for suspect in suspects:
        endpoints = [ratio.endpoint for ratio in suspects if ratio is not suspect]
        good = [entry for entry in exchanges if not any(part.has(entry) for part in endpoints)]
        ratio = compare(suspect.endpoint, good)
        if ratio is not None and ratio.is_slow:
            confirmed.append(ratio)
    return confirmed


def compare(endpoint: Endpoint, exchanges: Sequence[Exchange]) -> Ratio | None:
    """Return the duration of the exchanges of a node or rail, relative to exchanges of other nodes.

    ``endpoint`` is the node or rail, and ``exchanges`` are those of all nodes. None if it exchanged
    data with fewer than two nodes, or if other nodes have no exchanges on its rails.
    """
    own_exchanges = [entry for entry in exchanges if endpoint.has(entry)]
    partners = {sum(entry.nodes) - endpoint.node for entry in own_exchanges}
    rails = {entry.rail for entry in own_exchanges}
    other_exchanges = [
        entry for entry in exchanges if entry.rail in rails and endpoint.node not in entry.nodes
    ]
    if len(partners) < _MIN_PARTNERS or {entry.rail for entry in other_exchanges} != rails:
        return None
    levels = _compute_levels(other_exchanges)
    by_rail: dict[int, list[float]] = defaultdict(list)
    num_compared = 0
    for entry in own_exchanges:
        level = levels.get((entry.round, entry.rail), levels[None, entry.rail])
        by_rail[entry.rail].append(math.log(entry.seconds) - level.value)
        num_compared += level.count
    excess = median_low(median(excesses) for excesses in by_rail.values())
    pairs_per_level = num_compared / len(own_exchanges)
    variance = (
        _VARIANCE_OF_MEDIAN * (1 + _VARIANCE_OF_MEDIAN / pairs_per_level) / len(own_exchanges)
    )
    standard_error = _estimate_noise(other_exchanges, levels) * math.sqrt(variance)
    return Ratio(
        endpoint=endpoint,
        ratio=math.exp(excess),
        threshold=max(MIN_RATIO, math.exp(_MIN_STANDARD_ERRORS * standard_error)),
        partners=tuple(sorted(partners)),
        num_exchanges=len(own_exchanges),
    )


@dataclass(frozen=True)
class ScreeningLevel:
    """The typical duration of several exchanges, on a logarithmic scale."""

    value: float
    """The median of the logarithms of the durations in seconds."""
    count: int
    """The number of the durations."""


Levels = dict[tuple[int | None, int], ScreeningLevel]
"""The typical durations of exchanges by (round, rail), and over all rounds by (None, rail)."""


def _compute_levels(exchanges: Sequence[Exchange]) -> Levels:
    """Return the typical duration of the exchanges in each round and rail.

    It is also returned for each rail over all rounds, with None as the round.
    """
    groups: dict[tuple[int | None, int], list[float]] = defaultdict(list)
    for entry in exchanges:
        value = math.log(entry.seconds)
        groups[entry.round, entry.rail].append(value)
        groups[None, entry.rail].append(value)
    return {key: ScreeningLevel(median(values), len(values)) for key, values in groups.items()}


def _compute_corrected_excess(entry: Exchange, levels: Levels) -> float:
    """Return the logarithm of an exchange's duration relative to a typical duration.

    ``levels`` has the typical durations. The one of the exchange's round and rail is used, or that
    of all rounds if the round has a single exchange. The typical duration includes the exchange
    itself, so that the logarithm is too small by a factor. The result is corrected for this factor.
    """
    level = levels[entry.round, entry.rail]
    if level.count == 1:
        level = levels[None, entry.rail]
    deviation = math.log(entry.seconds) - level.value
    return deviation * math.sqrt(level.count / max(level.count - 1, 1))


def _estimate_noise(exchanges: Sequence[Exchange], levels: Levels) -> float:
    """Return the standard deviation of the logarithms of the durations of exchanges.

    It is estimated from the median absolute deviation of the logarithms from the typical durations
    in ``levels``.
    """
    return (
        median(abs(_compute_corrected_excess(entry, levels)) for entry in exchanges)
        / _MAD_OF_NORMAL
    )


def _find_slowest(exchanges: Sequence[Exchange]) -> Ratio | None:
    """Return the ratio of the slowest node if it is slow, otherwise of the slowest slow rail.

    None if neither the slowest node nor the slowest rail of all nodes is slow.
    """
    levels = _compute_levels(exchanges)
    excesses: dict[Endpoint, list[float]] = defaultdict(list)
    for entry in exchanges:
        for node in entry.nodes:
            excesses[Endpoint(node, entry.rail)].append(_compute_corrected_excess(entry, levels))
    rails = {endpoint: median(values) for endpoint, values in excesses.items()}
    by_node: dict[Endpoint, list[float]] = defaultdict(list)
    for endpoint, excess in rails.items():
        by_node[Endpoint(endpoint.node)].append(excess)
    nodes = {endpoint: median_low(values) for endpoint, values in by_node.items()}
    for candidates in (nodes, rails):
        if candidates:
            ratio = compare(max(candidates, key=candidates.__getitem__), exchanges)
            if ratio is not None and ratio.is_slow:
                return ratio
    return None
