"""Which nodes and which links are slow, from the times in which pairs of nodes exchanged in rounds. Pure.

A pair is as fast as the slower of its ends and what lies between them, in a round that may itself be slow:

    log t(i, j, r) = level(r) + max(node(i), node(j), link(i, j)) + noise

Each node is held against the pairs that neither it nor anything slow is in. It is slow if it is so with all it met, by
more than noise explains and by more than a floor; what it is with one of them only, is the link's. The strongest is set
aside and all others are looked at again, until nothing is left.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from parbench.bench.plan.groups import Pair
from parbench.bench.results.stats import median, t_quantile

_Numbers = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]
_LEAST_DF = 2
# variance of the Hodges-Lehmann estimate and of the median, in units of the mean's, for normal noise
_HODGES_LEHMANN, _MEDIAN = math.pi / 3, math.pi / 2


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The time in which two ranks exchanged in a round, while all other pairs of that round did."""

    turn: str
    pair: Pair
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as slow: ``alpha`` is how often any of a fine cluster may, ``floor`` the least slowness of interest.

    ``floor`` is a share of the time: 0.08 is eight per cent longer.
    """

    alpha: float
    floor: float


SUSPECT = Rule(alpha=0.05, floor=0.05)
BLAME = Rule(alpha=0.01, floor=0.08)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """How many times longer a node (one rank) or a link (two) takes, with a 95 % interval.

    ``partners`` are whom it was seen with in ``turns`` exchanges; ``least`` is the smallest factor that would have been
    called slow.
    """

    ranks: tuple[int, ...]
    factor: float
    low: float
    high: float
    least: float
    is_slow: bool
    partners: tuple[int, ...] = ()
    turns: int = 0

    @property
    def pair(self) -> Pair:
        return (self.ranks[0], self.ranks[-1])


@dataclass(frozen=True, kw_only=True)
class Slow:
    """The nodes and the links that are slow, strongest first."""

    nodes: tuple[Effect, ...] = ()
    links: tuple[Effect, ...] = ()

    @property
    def ranks(self) -> set[int]:
        return {effect.ranks[0] for effect in self.nodes}

    @property
    def pairs(self) -> set[Pair]:
        return {effect.pair for effect in self.links}

    def __bool__(self) -> bool:
        return bool(self.nodes or self.links)


def find_slow(exchanges: Sequence[Exchange], rule: Rule = SUSPECT) -> Slow:
    """Return the nodes and links that are slower than the rest; at most half of the nodes, for the rest is the measure.

    Nodes come before links: a slow node explains all its pairs.
    """
    slow = Slow()
    most = len(_ranks(exchanges)) // 2
    while len(slow.nodes) < most:
        if nodes := [
            effect for effect in node_effects(exchanges, slow, rule).values() if effect.is_slow
        ]:
            slow = replace(slow, nodes=(*slow.nodes, max(nodes, key=lambda effect: effect.factor)))
        elif links := [
            effect for effect in link_effects(exchanges, slow, rule).values() if effect.is_slow
        ]:
            slow = replace(slow, links=(*slow.links, max(links, key=lambda effect: effect.factor)))
        else:
            break
    return slow


def confirm(exchanges: Sequence[Exchange], suspects: Slow) -> Slow:
    """Return those of the suspects that are slow with good partners in exchanges of their own, made to confirm them."""
    good = _without(exchanges, suspects.ranks, suspects.pairs)
    nodes, links = [], []
    for [rank] in (effect.ranks for effect in suspects.nodes):
        seen = _without(exchanges, suspects.ranks - {rank}, suspects.pairs)
        nodes.append(_node_effect(rank, seen, BLAME, len(suspects.nodes)))
    for pair in sorted(suspects.pairs):
        seen = [*good, *(e for e in exchanges if e.pair == pair)]
        links.append(_link_effect(pair, seen, BLAME, len(suspects.links)))
    slow_nodes, slow_links = (
        tuple(one for one in found if one and one.is_slow) for found in (nodes, links)
    )
    return Slow(nodes=slow_nodes, links=slow_links)


def node_effects(exchanges: Sequence[Exchange], slow: Slow, rule: Rule) -> dict[int, Effect]:
    """Return the effect of each node that is not slow already and met at least two that are not."""
    clean = _without(exchanges, slow.ranks, slow.pairs)
    ranks = _ranks(clean)
    found = {rank: _node_effect(rank, clean, rule, len(ranks)) for rank in ranks}
    return {rank: effect for rank, effect in found.items() if effect is not None}


def link_effects(exchanges: Sequence[Exchange], slow: Slow, rule: Rule) -> dict[Pair, Effect]:
    """Return the effect of each pair of nodes that are not slow themselves, beyond that of the slower of the two."""
    clean = _without(exchanges, slow.ranks, slow.pairs)
    pairs = sorted({e.pair for e in clean})
    found = {pair: _link_effect(pair, clean, rule, len(pairs)) for pair in pairs}
    return {pair: effect for pair, effect in found.items() if effect is not None}


def _without(exchanges: Iterable[Exchange], ranks: Set[int], pairs: Set[Pair]) -> list[Exchange]:
    return [e for e in exchanges if not ranks & set(e.pair) and e.pair not in pairs]


def _ranks(exchanges: Iterable[Exchange]) -> list[int]:
    return sorted({rank for e in exchanges for rank in e.pair})


def _node_effect(
    rank: int, exchanges: Sequence[Exchange], rule: Rule, comparisons: int
) -> Effect | None:
    """Weigh a node's exchanges against those of others; None where they are too few to tell."""
    pairs = np.array([e.pair for e in exchanges]).reshape(-1, 2)
    own = (pairs == rank).any(axis=1)
    partners, of = np.unique(pairs[own].sum(axis=1) - rank, return_inverse=True)
    if len(partners) < 2 or own.all():
        return None
    excess, base, num_levels = _excess(exchanges, own)
    df = int(base.sum() + own.sum()) - num_levels - 1
    if not base.any() or df < _LEAST_DF:
        return None
    counts = np.bincount(of)
    means = np.bincount(of, excess[own]) / counts
    value = hodges_lehmann(means.tolist())
    noise = _scale(np.concatenate([excess[base], excess[own] - value]), df)
    # one that it is fast with clears it: a slow node is slow with everyone
    cleared = bool((means < value - np.maximum(value / 2, 3 * noise / np.sqrt(counts))).any())
    error = noise * math.sqrt(
        _HODGES_LEHMANN * (1 / counts).mean() / len(partners) + _MEDIAN / base.sum()
    )
    effect = _effect((rank,), value, error, df, rule, comparisons, cleared=cleared)
    return replace(effect, partners=tuple(partners.tolist()), turns=int(own.sum()))


def _link_effect(
    pair: Pair, exchanges: Sequence[Exchange], rule: Rule, comparisons: int
) -> Effect | None:
    """Weigh a link's exchanges against what its ends do with others; None where they are too few to tell."""
    pairs = np.array([e.pair for e in exchanges]).reshape(-1, 2)
    own = (pairs == pair).all(axis=1)
    ends = [(pairs == rank).any(axis=1) & ~own for rank in pair]
    if not own.any() or not all(end.any() for end in ends):
        return None
    excess, base, num_levels = _excess(exchanges, own)
    df = int(base.sum()) - num_levels
    if df < _LEAST_DF:
        return None
    beyond = excess[own] - max(0.0, *(hodges_lehmann(excess[end].tolist()) for end in ends))
    value = float(beyond.mean())
    shares = (1 / own.sum(), _HODGES_LEHMANN / min(end.sum() for end in ends), _MEDIAN / base.sum())
    error = _scale(excess[base], df) * math.sqrt(sum(shares))
    effect = _effect(
        pair, value, error, df, rule, comparisons, cleared=bool(beyond.min() < value / 2)
    )
    return replace(effect, partners=pair, turns=int(own.sum()))


def _effect(
    ranks: tuple[int, ...],
    value: float,
    error: float,
    df: int,
    rule: Rule,
    comparisons: int,
    *,
    cleared: bool,
) -> Effect:
    """Call slow what is above the floor, and above what noise gives in so many comparisons (Bonferroni).

    ``value`` and its standard error are logarithms; ``cleared`` is whether some exchange contradicts it.
    """
    needed = max(
        math.log1p(rule.floor), t_quantile(1 - rule.alpha / max(comparisons, 1), df) * error
    )
    reach = t_quantile(0.975, df) * error
    factor, low, high = (math.exp(value + way * reach) for way in (0, -1, 1))
    is_slow = value > needed and not cleared
    return Effect(
        ranks=ranks, factor=factor, low=low, high=high, least=math.exp(needed), is_slow=is_slow
    )


def _excess(exchanges: Sequence[Exchange], own: _Mask) -> tuple[_Numbers, _Mask, int]:
    """Return by how much longer each exchange took than the level of its round, as a logarithm.

    And which others than ``own`` made the levels, and how many there are: each round has its own where enough pairs
    tell it from a node's slowness, else all share one.
    """
    logs, base = np.log([e.seconds for e in exchanges]), ~own
    _, turns = np.unique([e.turn for e in exchanges], return_inverse=True)
    levels = np.full(len(logs), median(logs[base].tolist()))
    enough = np.bincount(turns[base], minlength=turns.max() + 1) >= 4
    if not enough[turns[own]].all():
        return logs - levels, base, 1
    for turn in np.flatnonzero(enough):
        levels[turns == turn] = median(logs[base & (turns == turn)].tolist())
    return logs - levels, base & enough[turns], int(enough.sum())


def hodges_lehmann(values: Iterable[float]) -> float:
    """Return the median of all averages of two values, each with itself too: nearly a mean, and robust as a median."""
    return median([(one + other) / 2 for one, other in combinations_with_replacement(values, 2)])


def _scale(residuals: _Numbers, df: int) -> float:
    """Return the standard deviation, at least 0.005, of residuals that have ``df`` degrees of freedom.

    Those beyond 2.5 times the median absolute residual (times 1.4826, as for normal noise) are pulled in.
    """
    pulled = np.minimum(np.abs(residuals), 2.5 * 1.4826 * median(np.abs(residuals).tolist()))
    return max(math.sqrt(np.square(pulled).sum() / df), 0.005)
