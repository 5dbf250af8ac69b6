"""Which experts each token goes to: generators of routing that are functions of seed, step and token alone. Pure.

A generator is a popularity p of experts. Tokens draw from it by systematic sampling: with u in [0, 1), those experts
whose intervals of cumulative inclusion k p hold u, u + 1, ..., u + k - 1. They are k different ones, and each is taken
as often as it is popular. Within a run of tokens u takes evenly spaced values, so that loads are the closed form to
within one token a run; between runs the order of the experts changes, so that any two may meet in a token.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from parbench.bench.text import UserError, one_of

NOWHERE = -1
"""The expert of a token that goes to none, as padding does."""
ROUTER = "router"
"""The routing that is no generator: what the trained router chooses."""
BALANCED = "balanced"
BURST_PERIOD = 4
_RUN_TOKENS = 64
_SPACING = 1 << 20

Routes = list[tuple[int, ...]]

# the number that may follow a name, and what it means
_STRENGTHS = {
    BALANCED: (0.0, "every expert alike"),
    "zipf": (1.0, "the r-th expert in a drawn order has r^-S"),
    "lognormal": (1.0, "exp of a normal of deviation S (fits real loads best, DeepEP #393)"),
    "hot_experts": (4.0, "an eighth of the experts, drawn, is S times as popular"),
    "hot_rank": (3.0, "the first rank's experts are S times as popular"),
    "spread_hot": (4.0, "one expert of every rank is S times as popular"),
    "ragged": (0.25, "balanced, but ranks send from S of their tokens, the first, to all, the last"),
    "idle_rank": (0.0, "the last rank's experts get nothing"),
    "rotating": (3.0, "as hot_rank, another rank's in each step"),
    "burst": (3.0, "balanced, and in every fourth step as hot_rank"),
}
GENERATORS = tuple(_STRENGTHS)
NAMES = (ROUTER, *GENERATORS)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A generator with all that its routes depend on.

    ``parts`` is the number of blocks of experts that hot and idle ranks are counted in: the world's size, whatever
    part of it shares the experts, so that every layout has the same routes. ``tokens`` are one rank's in a step.
    """

    name: str
    strength: float
    seed: int
    experts: int
    top_k: int
    parts: int
    tokens: int


def parse_routing(text: str) -> tuple[str, float]:
    """Return name and strength of ``NAME`` or ``NAME:STRENGTH``; ``UserError`` for others."""
    name, colon, number = text.partition(":")
    if name not in NAMES:
        raise UserError(f"routing = {text!r} is not known: routing is {one_of(NAMES, name)}")
    if not colon:
        return name, _STRENGTHS[name][0] if name in _STRENGTHS else 0.0
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if name in (ROUTER, BALANCED, "idle_rank"):
        raise UserError(f"routing = {text!r} is not allowed: {name} has no strength")
    if not 0 < strength < math.inf or (name == "ragged" and strength > 1):
        allowed = "a number above 0 and at most 1" if name == "ragged" else "a number above 0"
        raise UserError(f"routing = {text!r} is not allowed: the strength of {name} is {allowed}")
    return name, strength


def refuse_routing(generator: Generator) -> str | None:
    """Say by equation why there are too few experts; None if there are not."""
    popular = sum(weight > 0 for weight in _weights(generator, 0))
    if generator.top_k > popular:
        return f"top_k({generator.top_k}) > experts({generator.experts}) - idle({generator.experts - popular})"
    return None


def popularity(generator: Generator, step: int) -> tuple[float, ...]:
    """Return each expert's share of all routes in a step; they sum to 1."""
    total = sum(weights := _weights(generator, step))
    return tuple(weight / total for weight in weights)


def _weights(generator: Generator, step: int) -> list[float]:
    name, strength, experts = generator.name, generator.strength, generator.experts
    chance = random.Random(f"popularity {generator.seed}")
    if name == "zipf":
        return [rank**-strength for rank in chance.sample(range(1, experts + 1), experts)]
    if name == "lognormal":
        return [math.exp(chance.gauss(0.0, strength)) for _ in range(experts)]
    unlike = set(_unlike(generator, step, chance))
    return [strength if expert in unlike else 1.0 for expert in range(experts)]


def _unlike(generator: Generator, step: int, chance: random.Random) -> Iterable[int]:
    """Return the experts that are ``strength`` times as popular as the rest."""
    name, experts = generator.name, generator.experts
    parts = min(max(generator.parts, 2), experts)
    block = experts // parts
    if name == "hot_experts":
        return chance.sample(range(experts), max(1, experts // 8))
    if name == "spread_hot":
        return [part * block + chance.randrange(block) for part in range(parts)]
    if name == "idle_rank":
        return range(experts - block, experts)
    if name == "rotating":
        return range(first := step % parts * block, first + block)
    hot = name == "hot_rank" or (name == "burst" and step % BURST_PERIOD == BURST_PERIOD - 1)
    return range(block if hot else 0)


def inclusion(generator: Generator, step: int) -> tuple[float, ...]:
    """Return the share of tokens that take each expert, k p and at most 1; what is above 1 goes to the others."""
    shares, left = list(popularity(generator, step)), float(generator.top_k)
    full: set[int] = set()
    while True:
        rest = sum(share for expert, share in enumerate(shares) if expert not in full)
        over = {e for e, share in enumerate(shares) if e not in full and left * share > rest}
        if not over:
            break
        full |= over
        left -= len(over)
    return tuple(1.0 if e in full else (left * share / rest if rest else 0.0) for e, share in enumerate(shares))


def routes(generator: Generator, step: int, first: int, count: int) -> Routes:
    """Return the experts of ``count`` tokens of a step's global batch from the token of number ``first`` on.

    Each token has k different experts, or k times NOWHERE.
    """
    if generator.name != "ragged":
        return _drawn(generator, step, first, count)
    found: Routes = []
    while len(found) < count:
        source, place = divmod(first + len(found), generator.tokens)
        found += _ragged(generator, step, source, place, min(count - len(found), generator.tokens - place))
    return found


def _drawn(generator: Generator, step: int, first: int, count: int) -> Routes:
    length = run_tokens(generator.experts)
    lengths = _intervals(inclusion(generator, step), generator.top_k, length * _SPACING)
    runs = range(first // length, -(-(first + count) // length))
    drawn = [of for run in runs for of in _run(generator, step, run, lengths)]
    return drawn[first % length : first % length + count]


def _ragged(generator: Generator, step: int, source: int, first: int, count: int) -> Routes:
    """Return the routes of some of one rank's tokens: padding is spread evenly over them, the rest draw in order."""
    share = source_share(generator, source)
    sent = [math.floor((first + i) * share + 1e-9) for i in range(count + 1)]
    drawn = iter(_drawn(generator, step, source * generator.tokens + sent[0], sent[-1] - sent[0]))
    nothing = (NOWHERE,) * generator.top_k
    return [next(drawn) if after > before else nothing for before, after in pairwise(sent)]


def run_tokens(experts: int) -> int:
    """Return the tokens of a run: a multiple of the experts, so that balanced loads are whole numbers."""
    return experts * -(-_RUN_TOKENS // experts)


def _run(generator: Generator, step: int, run: int, lengths: Sequence[int]) -> Routes:
    length = run_tokens(generator.experts)
    chance = random.Random(f"{generator.seed} {step} {run}")
    order = list(range(generator.experts))
    chance.shuffle(order)
    ends = list(accumulate(lengths[expert] for expert in order))
    start = chance.randrange(_SPACING)
    # a stride that visits all places of a run, and spreads what is only a part of one
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, length) > 1:
        stride += 1
    marks = [length * _SPACING * j for j in range(generator.top_k)]
    return [
        tuple([order[bisect_right(ends, u + mark)] for mark in marks])
        for u in (start + i * stride % length * _SPACING for i in range(length))
    ]


def _intervals(shares: Sequence[float], top_k: int, whole: int) -> list[int]:
    """Return inclusions in units of 1 / ``whole``, none above it, whose sum is ``top_k`` of it: no token misses one."""
    lengths = [min(whole, math.floor(share * whole + 1e-6)) for share in shares]
    missing = top_k * whole - sum(lengths)
    by_remainder = sorted(range(len(shares)), key=lambda e: lengths[e] - shares[e] * whole)
    for expert in [e for e in by_remainder if 0 < lengths[e] < whole][:missing]:
        lengths[expert] += 1
    return lengths


def source_share(generator: Generator, source: int) -> float:
    """Return which part of its tokens a rank sends: all, unless sources are ragged."""
    if generator.name != "ragged" or generator.parts < 2:
        return 1.0
    # tokens that no even split gives to a rank are the last one's
    return generator.strength + (1 - generator.strength) * min(source / (generator.parts - 1), 1.0)


def imbalance(loads: Sequence[float]) -> float | None:
    """Return max / mean; None where there is no load."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else None


def capacity(factor: float, top_k: int, tokens: int, experts: int) -> int:
    """Return the tokens of one source and microbatch that an expert takes, C = ceil(cf k T / E)."""
    return math.ceil(factor * top_k * tokens / experts - 1e-9)


def expected_loads(generator: Generator, step: int, tokens: int, source: int = 0) -> list[float]:
    """Return the closed form of the loads that ``tokens`` of a rank make: T k p, or of those that it sends."""
    sent = tokens * source_share(generator, source)
    return [sent * share for share in inclusion(generator, step)]


def expected_drop_rate(generator: Generator, step: int, tokens: int, slots: int) -> float:
    """Return the closed form of the drop rate over all ranks' microbatches of ``tokens`` tokens."""
    loads = [expected_loads(generator, step, tokens, source) for source in range(generator.parts)]
    dropped = sum(max(0.0, load - slots) for of in loads for load in of)
    return dropped / sum(sum(of) for of in loads)
