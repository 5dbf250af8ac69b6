"""Synthetic expert routing: the experts of each token as a function of seed, step and token alone. Pure.

A generator is a popularity p of experts. Tokens draw from it by systematic sampling. With u in [0, 1), a token takes
the experts whose intervals of cumulative inclusion k p contain u, u + 1, ..., u + k - 1. These are k different
experts, and each expert is taken as often as it is popular. Within a run of tokens u takes evenly spaced values, so
that loads agree with the analytical ones to within one token per run. Between runs the order of the experts changes,
so that any two experts can meet in a token.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from parbench.bench.text import UserError, format_choices

NOWHERE = -1
"""The expert of a token that no rank computes."""
ROUTER = "router"
"""The routing that is not a generator: the trained router chooses."""
BALANCED = "balanced"
ZIPF = "zipf"
HOT_RANK = "hot_rank"
_RUN_TOKENS = 64
_SPACING = 1 << 20

Routes = list[tuple[int, ...]]

_DEFAULT_STRENGTH = {
    BALANCED: 0.0,  # every expert is equally popular
    ZIPF: 1.0,  # the popularity of the r-th expert in a random order is r^-S
    HOT_RANK: 3.0,  # the first rank's experts are S times as popular as the others
}
GENERATORS = tuple(_DEFAULT_STRENGTH)
NAMES = (ROUTER, *GENERATORS)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A generator with everything that its routes depend on."""

    name: str
    strength: float
    seed: int
    experts: int
    top_k: int
    parts: int  # blocks of experts that hot ranks are counted in: the world size, so that all layouts route alike


def parse_routing(text: str) -> tuple[str, float]:
    """Return name and strength of ``NAME`` or ``NAME:STRENGTH``; raise ``UserError`` for anything else."""
    name, colon, number = text.partition(":")
    if name not in NAMES:
        raise UserError(
            f"routing = {text!r} is not known: routing is {format_choices(NAMES, name)}"
        )
    if not colon:
        return name, _DEFAULT_STRENGTH.get(name, 0.0)
    if name in (ROUTER, BALANCED):
        raise UserError(f"routing = {text!r} is not allowed: {name} has no strength")
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not 0 < strength < math.inf:
        raise UserError(
            f"routing = {text!r} is not allowed: the strength of {name} is a number above 0"
        )
    return name, strength


def popularity(generator: Generator) -> tuple[float, ...]:
    """Return each expert's share of all routes; the shares sum to 1."""
    weights = _weights(generator)
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _weights(generator: Generator) -> list[float]:
    experts, strength = generator.experts, generator.strength
    if generator.name == ZIPF:
        ranks = random.Random(f"popularity {generator.seed}").sample(range(1, experts + 1), experts)
        return [rank**-strength for rank in ranks]
    hot_experts = 0
    if generator.name == HOT_RANK:
        hot_experts = experts // min(max(generator.parts, 2), experts)
    return [strength] * hot_experts + [1.0] * (experts - hot_experts)


def inclusion(generator: Generator) -> tuple[float, ...]:
    """Return the share of tokens that take each expert: k p, at most 1, the excess spread over the other experts."""
    shares, left = list(popularity(generator)), float(generator.top_k)
    full: set[int] = set()
    while True:
        rest = sum(share for expert, share in enumerate(shares) if expert not in full)
        over = {e for e, share in enumerate(shares) if e not in full and left * share > rest}
        if not over:
            break
        full |= over
        left -= len(over)
    return tuple(
        1.0 if e in full else (left * share / rest if rest else 0.0)
        for e, share in enumerate(shares)
    )


def routes(generator: Generator, step: int, first: int, count: int) -> Routes:
    """Return k different experts for each of ``count`` tokens of a step's global batch, from token ``first`` on."""
    length = run_tokens(generator.experts)
    lengths = _intervals(inclusion(generator), generator.top_k, length * _SPACING)
    runs = range(first // length, -(-(first + count) // length))
    drawn = [experts for run in runs for experts in _draw_run(generator, step, run, lengths)]
    return drawn[first % length : first % length + count]


def run_tokens(experts: int) -> int:
    """Return the tokens of a run: a multiple of the experts, so that balanced loads are whole numbers."""
    return experts * -(-_RUN_TOKENS // experts)


def _draw_run(generator: Generator, step: int, run: int, lengths: Sequence[int]) -> Routes:
    length = run_tokens(generator.experts)
    chance = random.Random(f"{generator.seed} {step} {run}")
    order = list(range(generator.experts))
    chance.shuffle(order)
    ends = list(accumulate(lengths[expert] for expert in order))
    start = chance.randrange(_SPACING)
    # A stride that visits all places of a run also spreads the tokens of a part of a run.
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, length) > 1:
        stride += 1
    marks = [length * _SPACING * j for j in range(generator.top_k)]
    return [
        tuple([order[bisect_right(ends, u + mark)] for mark in marks])
        for u in (start + i * stride % length * _SPACING for i in range(length))
    ]


def _intervals(shares: Sequence[float], top_k: int, whole: int) -> list[int]:
    """Return inclusions as integers in units of 1 / ``whole``, at most ``whole`` each, that sum to ``top_k * whole``.

    An exact sum leaves no token without an expert.
    """
    lengths = [min(whole, math.floor(share * whole + 1e-6)) for share in shares]
    missing = top_k * whole - sum(lengths)
    by_remainder = sorted(range(len(shares)), key=lambda e: lengths[e] - shares[e] * whole)
    for expert in [e for e in by_remainder if 0 < lengths[e] < whole][:missing]:
        lengths[expert] += 1
    return lengths


def imbalance(loads: Sequence[float]) -> float | None:
    """Return max / mean; None where there is no load."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else None


def capacity(factor: float, top_k: int, tokens: int, experts: int) -> int:
    """Return the tokens of one source and microbatch that an expert takes, C = ceil(cf k T / E)."""
    return math.ceil(factor * top_k * tokens / experts - 1e-9)


def expected_loads(generator: Generator, tokens: int) -> list[float]:
    """Return the analytical load of each expert: T k p."""
    return [tokens * share for share in inclusion(generator)]


def expected_drop_rate(generator: Generator, tokens: int, slots: int) -> float:
    """Return the analytical drop rate of microbatches of ``tokens`` tokens."""
    loads = expected_loads(generator, tokens)
    return sum(max(0.0, load - slots) for load in loads) / sum(loads)
