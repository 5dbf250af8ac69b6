"""Which nodes and which links are slow, from the times in which pairs of nodes exchanged in rounds. Pure.

A pair is as fast as the slower of its ends and what lies between them, in a round that may itself be slow:

    log t(i, j, r) = level(r) + max(node(i), node(j), link(i, j)) + noise

Each node is held against the pairs that neither it nor anything slow is in. It is slow if it is so with all it met, by
more than noise explains and by more than a floor; what it is with one of them only, is the link's. The strongest is set
aside and all others are looked at again, until nothing is left.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bench.plan.groups import Pair
from bench.results.stats import median, t_quantile

_PAIRS_FOR_A_LEVEL = 4
_WINSOR = 2.5
_LEAST_NOISE = 0.005
_EXONERATES = 3.0
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
    partners: tuple[int, ...]
    turns: int
    is_slow: bool


@dataclass(frozen=True, kw_only=True)
class Slow:
    """The nodes and the links that are slow, strongest first."""

    nodes: tuple[Effect, ...] = ()
    links: tuple[Effect, ...] = ()

    @property
    def ranks(self) -> set[int]:
        """The slow nodes."""
        return {effect.ranks[0] for effect in self.nodes}

    @property
    def pairs(self) -> set[Pair]:
        """The slow links."""
        return {(effect.ranks[0], effect.ranks[1]) for effect in self.links}

    def __bool__(self) -> bool:
        return bool(self.nodes or self.links)


def find_slow(exchanges: Sequence[Exchange], rule: Rule = SUSPECT) -> Slow:
    """Return the nodes and links that are slower than the rest; at most half of the nodes, for the rest is the measure.

    Nodes come before links: a slow node explains all its pairs.
    """
    slow = Slow()
    num_nodes = len(_ranks(exchanges))
    while len(slow.nodes) < num_nodes // 2:
        nodes = [effect for effect in node_effects(exchanges, slow, rule).values() if effect.is_slow]
        if nodes:
            slow = Slow(nodes=(*slow.nodes, max(nodes, key=lambda effect: effect.factor)), links=slow.links)
            continue
        links = [effect for effect in link_effects(exchanges, slow, rule).values() if effect.is_slow]
        if not links:
            break
        slow = Slow(nodes=slow.nodes, links=(*slow.links, max(links, key=lambda effect: effect.factor)))
    return slow


def confirm(exchanges: Sequence[Exchange], suspects: Slow, rule: Rule = BLAME) -> Slow:
    """Return those of the suspects that are slow with good partners in exchanges of their own, made to confirm them."""
    good = [e for e in exchanges if not suspects.ranks & set(e.pair) and e.pair not in suspects.pairs]
    nodes = []
    for [rank] in (effect.ranks for effect in suspects.nodes):
        own = [e for e in exchanges if rank in e.pair and not (suspects.ranks - {rank}) & set(e.pair)]
        own = [e for e in own if e.pair not in suspects.pairs]
        nodes.append(_node_effect(rank, own, good, rule, len(suspects.nodes)))
    links = []
    for pair in sorted(suspects.pairs):
        own = [e for e in exchanges if e.pair == pair]
        links.append(_link_effect(pair, own, good, rule, len(suspects.links)))
    return Slow(
        nodes=tuple(effect for effect in nodes if effect is not None and effect.is_slow),
        links=tuple(effect for effect in links if effect is not None and effect.is_slow),
    )


def node_effects(exchanges: Sequence[Exchange], slow: Slow, rule: Rule) -> dict[int, Effect]:
    """Return the effect of each node that is not slow already and met at least two that are not."""
    clean = _without(exchanges, slow)
    ranks = _ranks(clean)
    found = {}
    for rank in ranks:
        own = [e for e in clean if rank in e.pair]
        base = [e for e in clean if rank not in e.pair]
        effect = _node_effect(rank, own, base, rule, len(ranks))
        if effect is not None:
            found[rank] = effect
    return found


def link_effects(exchanges: Sequence[Exchange], slow: Slow, rule: Rule) -> dict[Pair, Effect]:
    """Return the effect of each pair of nodes that are not slow themselves, beyond that of the slower of the two."""
    clean = _without(exchanges, slow)
    pairs = sorted({e.pair for e in clean})
    found = {}
    for pair in pairs:
        own = [e for e in clean if e.pair == pair]
        base = [e for e in clean if e.pair != pair]
        effect = _link_effect(pair, own, base, rule, len(pairs))
        if effect is not None:
            found[pair] = effect
    return found


def _without(exchanges: Iterable[Exchange], slow: Slow) -> list[Exchange]:
    return [e for e in exchanges if not slow.ranks & set(e.pair) and e.pair not in slow.pairs]


def _ranks(exchanges: Iterable[Exchange]) -> list[int]:
    return sorted({rank for e in exchanges for rank in e.pair})


@dataclass(frozen=True, kw_only=True)
class _Estimate:
    """A logarithm with its standard error; ``cleared`` is whether some exchange contradicts it."""

    value: float
    error: float
    df: int
    cleared: bool
    partners: tuple[int, ...]
    turns: int


def _node_effect(
    rank: int, own: Sequence[Exchange], base: Sequence[Exchange], rule: Rule, comparisons: int
) -> Effect | None:
    """Weigh a node's exchanges against those of others; None where they are too few to tell."""
    excess = _excess_over(base, {e.turn for e in own})
    by_partner: dict[int, list[float]] = defaultdict(list)
    for e in own:
        by_partner[sum(e.pair) - rank].append(excess(e))
    met = len(by_partner)
    means = {partner: sum(values) / len(values) for partner, values in by_partner.items()}
    value = hodges_lehmann(list(means.values())) if met else 0.0
    residuals = [excess(e) for e in excess.base] + [one - value for values in by_partner.values() for one in values]
    df = len(residuals) - excess.num_levels - 1
    if met < 2 or not excess.base or df < _LEAST_DF:
        return None
    noise = scale(residuals, df)
    share = sum(1 / len(values) for values in by_partner.values()) / met
    # one that it is fast with clears it: a slow node is slow with everyone
    cleared = any(
        mean < value - max(value / 2, _EXONERATES * noise / math.sqrt(len(by_partner[partner])))
        for partner, mean in means.items()
    )
    error = noise * math.sqrt(_HODGES_LEHMANN * share / met + _MEDIAN / len(excess.base))
    partners = tuple(sorted(means))
    found = _Estimate(value=value, error=error, df=df, cleared=cleared, partners=partners, turns=len(own))
    return _judge((rank,), found, rule, comparisons)


def _link_effect(
    pair: Pair, own: Sequence[Exchange], base: Sequence[Exchange], rule: Rule, comparisons: int
) -> Effect | None:
    """Weigh a link's exchanges against what its ends do with others; None where they are too few to tell."""
    ends = [[e for e in base if rank in e.pair] for rank in pair]
    excess = _excess_over(base, {e.turn for e in own})
    df = len(excess.base) - excess.num_levels
    if not own or not all(ends) or df < _LEAST_DF:
        return None
    slower_end = max(0.0, *(hodges_lehmann([excess(e) for e in end]) for end in ends))
    beyond = [excess(e) - slower_end for e in own]
    value = sum(beyond) / len(beyond)
    noise = scale([excess(e) for e in excess.base], df)
    shares = (1 / len(own), _HODGES_LEHMANN / min(map(len, ends)), _MEDIAN / len(excess.base))
    cleared = min(beyond) < value / 2
    error = noise * math.sqrt(sum(shares))
    found = _Estimate(value=value, error=error, df=df, cleared=cleared, partners=pair, turns=len(own))
    return _judge(pair, found, rule, comparisons)


def _judge(ranks: tuple[int, ...], found: _Estimate, rule: Rule, comparisons: int) -> Effect:
    """Call slow what is above the floor, and above what noise gives in so many comparisons (Bonferroni)."""
    needed = max(math.log1p(rule.floor), t_quantile(1 - rule.alpha / max(comparisons, 1), found.df) * found.error)
    reach = t_quantile(0.975, found.df) * found.error
    return Effect(
        ranks=ranks,
        factor=math.exp(found.value),
        low=math.exp(found.value - reach),
        high=math.exp(found.value + reach),
        least=math.exp(needed),
        partners=found.partners,
        turns=found.turns,
        is_slow=found.value > needed and not found.cleared,
    )


@dataclass(frozen=True, kw_only=True)
class _Excess:
    """How much longer an exchange took than the level of its round, as a logarithm; ``base`` made the levels."""

    levels: dict[str, float]
    shared: float
    base: tuple[Exchange, ...]

    @property
    def num_levels(self) -> int:
        return len(self.levels) or 1

    def __call__(self, exchange: Exchange) -> float:
        return math.log(exchange.seconds) - self.levels.get(exchange.turn, self.shared)


def _excess_over(base: Sequence[Exchange], turns: Collection[str]) -> _Excess:
    """Return what measures exchanges of these turns against ``base``.

    Each round has a level of its own where enough pairs tell it from a node's slowness, else all share one.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for e in base:
        logs[e.turn].append(math.log(e.seconds))
    shared = median([value for values in logs.values() for value in values]) if logs else 0.0
    if not logs or any(len(logs.get(turn, ())) < _PAIRS_FOR_A_LEVEL for turn in turns):
        return _Excess(levels={}, shared=shared, base=tuple(base))
    levels = {turn: median(values) for turn, values in logs.items() if len(values) >= _PAIRS_FOR_A_LEVEL}
    return _Excess(levels=levels, shared=shared, base=tuple(e for e in base if e.turn in levels))


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of all averages of two values, each with itself too: nearly a mean, and robust as a median."""
    return median([(a + b) / 2 for i, a in enumerate(values) for b in values[i:]])


def scale(residuals: Sequence[float], df: int) -> float:
    """Return the standard deviation of residuals that have ``df`` degrees of freedom, far ones pulled in.

    Far is beyond 2.5 times the median absolute residual (times 1.4826, as for normal noise).
    """
    limit = _WINSOR * 1.4826 * median([abs(value) for value in residuals])
    pulled = [min(abs(value), limit) for value in residuals]
    return max(math.sqrt(sum(value * value for value in pulled) / df), _LEAST_NOISE)
