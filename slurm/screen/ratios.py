"""The slow nodes and rails of a cluster, from the durations of exchanges in rounds of pairs.

An exchange is as slow as the slower of its two nodes. A rail is a GPU and its NIC. The excess of an
exchange is the natural logarithm of its duration over the median duration of other pairs in its
round and on its rail, because a whole round may be slow. The excess of a rail of a node is the
median over its exchanges, and the excess of a node is the median over its rails. The slowest node
is removed with its exchanges, and the others are compared again, until none is slow. Rails are then
compared in the same way. Most pairs must be fast, so at most about a quarter of the nodes may be
slow.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from parbench.bench.plan.groups import Pair

MIN_RATIO = 1.05
"""The smallest value of ``Ratio.threshold``: a node or rail with a smaller ratio is never slow."""
_MIN_STANDARD_ERRORS = 3.0
"""The number of standard errors of ln(ratio) above 0 from which a node or rail counts as slow."""
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
    """The number of the round among the rounds that were measured, from 0.

    All exchanges of a round happen at the same time.
    """
    nodes: Pair
    """The indices of the two nodes in ``Measurement.nodes``."""
    rail: int
    """The local rank on both nodes: local rank i exchanges data only with local rank i."""
    seconds: float
    """The duration of one exchange on the slower of both ranks, the median over its samples.

    In an exchange, both ranks send the same number of bytes to each other, one after the other. The
    duration covers both directions.
    """


@dataclass(frozen=True)
class Endpoint:
    """A node, or one rail of one node: the GPU and the NIC of one of its local ranks."""

    node: int
    """The index of the node in ``Measurement.nodes``."""
    rail: int | None = None
    """The local rank of the rail, None for the whole node."""

    def has(self, exchange: Exchange) -> bool:
        """Return True if this node takes part in the exchange.

        For a rail, the exchange must also have its local rank.
        """
        return self.node in exchange.nodes and self.rail in (None, exchange.rail)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The duration of a node's or rail's exchanges, relative to exchanges between other nodes."""

    endpoint: Endpoint
    """The node or rail whose exchanges are compared."""
    ratio: float
    """The factor by which the exchanges of the node or rail take longer: 1.2 is 20 % longer.

    The duration of each exchange is divided by the median duration of the exchanges between other
    nodes in the same round, with the same local rank. If other nodes did not exchange data with
    this local rank in the round, the median is over their exchanges of all rounds. The ratio of a
    rail is the median of these quotients over its exchanges. The ratio of a node is the median of
    the ratios of its rails, of two middle rails the lower one.
    """
    threshold: float
    """The ratio above which the node or rail counts as slow.

    It is the larger of 1.05 and exp(3 s), where s is the standard error of the natural logarithm of
    the ratio. s is proportional to the standard deviation of ln(duration) of the exchanges between
    other nodes within a round and local rank, and falls with a larger ``num_exchanges``.
    """
    partners: tuple[int, ...]
    """The indices in ``Measurement.nodes`` of the nodes exchanged with, ascending."""
    num_exchanges: int
    """The number of exchanges of the node or rail from which the ratio was computed."""

    @property
    def is_slow(self) -> bool:
        """True if the ratio is above the threshold."""
        return self.ratio > self.threshold


def find_slow(exchanges: Iterable[Exchange]) -> list[Ratio]:
    """Return a ``Ratio`` for each slow node, and for each slow rail of other nodes.

    The ratio is the duration of the exchanges of a node or rail over the duration of exchanges
    between other nodes. A node or rail is slow if its ratio is above its threshold, which is at
    least 1.05. The slowest node is found first, or the slowest rail if no node is slow. Its
    exchanges are removed, and the search is repeated. The result has the order of this search. At
    most half of the nodes are in the result.

    Args:
        exchanges: the exchanges of all nodes in all rounds of one measurement.
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
    """Return a ``Ratio`` for each node or rail that is slow in a second measurement too.

    A returned ``Ratio`` is computed from the second measurement only. It replaces the ``Ratio`` of
    the first measurement. Each suspect is compared only with nodes and rails that are not suspects.
    Exchanges of other suspects are left out.

    Args:
        exchanges: all exchanges of the second measurement.
        suspects: the ratios of the nodes and rails that were slow in the first measurement.
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

    The result is None in two cases. The node or rail exchanged data with fewer than two nodes. Or
    it has a local rank for which ``exchanges`` contains no exchange between two other nodes, so
    that there is nothing to compare its exchanges with.

    Args:
        endpoint: the node or rail.
        exchanges: the exchanges of the node or rail, and those of the nodes to compare it with.
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
    deviations = [abs(_compute_corrected_excess(entry, levels)) for entry in other_exchanges]
    standard_error = median(deviations) / _MAD_OF_NORMAL * math.sqrt(variance)
    return Ratio(
        endpoint=endpoint,
        ratio=math.exp(excess),
        threshold=max(MIN_RATIO, math.exp(_MIN_STANDARD_ERRORS * standard_error)),
        partners=tuple(sorted(partners)),
        num_exchanges=len(own_exchanges),
    )


@dataclass(frozen=True)
class ScreeningLevel:
    """The median duration of exchanges with one local rank (rail), as a logarithm.

    The exchanges are those of several pairs of nodes, in one round or in all rounds.
    """

    value: float
    """The median over the exchanges of the natural logarithm of the duration in seconds."""
    count: int
    """The number of exchanges over which the median is taken."""


Levels = dict[tuple[int | None, int], ScreeningLevel]
"""The median ln(duration in s) of exchanges and their number, by round and rail.

The key (round, rail) has the median over the pairs of nodes that exchanged data in this round with
this local rank. The key (None, rail) has the median over all rounds.
"""


def _compute_levels(exchanges: Sequence[Exchange]) -> Levels:
    """Return the median ln(duration) of the exchanges of each round and local rank.

    A key is (round, rail), where the rail is the local rank. The key (None, rail) has the median
    over all rounds. A value is a ``ScreeningLevel``: the median of the natural logarithms of the
    durations in seconds, and the number of exchanges.
    """
    groups: dict[tuple[int | None, int], list[float]] = defaultdict(list)
    for entry in exchanges:
        value = math.log(entry.seconds)
        groups[entry.round, entry.rail].append(value)
        groups[None, entry.rail].append(value)
    return {key: ScreeningLevel(median(values), len(values)) for key, values in groups.items()}


def _compute_corrected_excess(entry: Exchange, levels: Levels) -> float:
    """Return ln(duration / median duration) of an exchange, corrected for a small sample.

    The median is over the n exchanges with the round and the local rank of ``entry``. If ``entry``
    is the only one of them, the median is over all rounds. The n exchanges include ``entry``, which
    makes the logarithm too small. Therefore it is multiplied by sqrt(n / (n - 1)).

    Args:
        entry: the exchange.
        levels: the median durations, computed from exchanges that include ``entry``.
    """
    level = levels[entry.round, entry.rail]
    if level.count == 1:
        level = levels[None, entry.rail]
    deviation = math.log(entry.seconds) - level.value
    return deviation * math.sqrt(level.count / max(level.count - 1, 1))


def _find_slowest(exchanges: Sequence[Exchange]) -> Ratio | None:
    """Return the ``Ratio`` of the slowest node or, if no node is slow, of the slowest rail.

    A rail is one local rank of one node. The slowest node or rail is the one whose exchanges took
    longest relative to the others. It is slow if its ratio is above ``Ratio.threshold``, which is
    at least 1.05. It is not slow if it cannot be compared, because it exchanged data with fewer
    than two nodes or because other nodes did not exchange data with one of its local ranks. The
    result is None if neither the slowest node nor the slowest rail is slow. ``exchanges`` are those
    of the nodes and rails that are not already known to be slow.
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
