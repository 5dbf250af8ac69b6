"""Synthetic expert routing: the experts of each token as a function of seed, step and token. Pure.

A generator is a popularity p of experts. Tokens draw from it by systematic sampling. With u in
[0, 1), a token takes the experts whose intervals of cumulative inclusion k p contain u, u + 1, ...,
u + k - 1. These are k different experts, and each expert is taken as often as it is popular. Within
a run of tokens u takes evenly spaced values, so that loads agree with the analytical ones to within
one token per run. Between runs the order of the experts changes, so that any two experts can meet in
a token.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from parbench.bench.text import UserError, format_choices

NO_EXPERT = -1
"""The expert id of a dropped pair of token and expert."""
ROUTER = "router"
"""The routing in which the trained router selects experts."""
BALANCED = "balanced"
ZIPF = "zipf"
HOT_RANK = "hot_rank"
_RUN_TOKENS = 64
_SPACING = 1 << 20

ExpertIds = list[tuple[int, ...]]
"""The experts of each token."""

_DEFAULT_STRENGTH = {
    BALANCED: 0.0,  # every expert is equally popular
    ZIPF: 1.0,  # the popularity of the r-th expert in a random order is r^-S
    HOT_RANK: 3.0,  # the first rank's experts are S times as popular as the others
}
GENERATORS = tuple(_DEFAULT_STRENGTH)
NAMES = (ROUTER, *GENERATORS)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A generator with everything that its routing depends on."""

    name: str
    strength: float
    seed: int
    experts: int
    top_k: int
    parts: int  # blocks of experts that hot ranks are counted in: the world size for all layouts


def parse_routing(text: str) -> tuple[str, float]:
    """Return name and strength of ``NAME`` or ``NAME:STRENGTH``; raise ``UserError`` otherwise."""
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


def compute_popularity(generator: Generator) -> list[float]:
    """Return each expert's share of all pairs of token and expert; the shares sum to 1."""
    experts = generator.experts
    strength = generator.strength
    weights = [1.0] * experts
    if generator.name == ZIPF:
        random_order = random.Random(f"popularity {generator.seed}")
        ranks = random_order.sample(range(1, experts + 1), experts)
        weights = [rank**-strength for rank in ranks]
    elif generator.name == HOT_RANK:
        hot_experts = experts // min(max(generator.parts, 2), experts)
        weights[:hot_experts] = [strength] * hot_experts
    total = sum(weights)
    return [weight / total for weight in weights]


def compute_inclusion(generator: Generator) -> list[float]:
    """Return the share of tokens that take each expert.

    It is k p, at most 1. The excess is spread over the other experts.
    """
    popularity = compute_popularity(generator)
    inclusion = [0.0] * generator.experts
    remaining_experts = set(range(generator.experts))
    remaining_choices = float(generator.top_k)
    while remaining_experts:
        total = sum(popularity[expert] for expert in remaining_experts)
        for expert in remaining_experts:
            inclusion[expert] = min(1.0, remaining_choices * popularity[expert] / total)
        full = {
            expert for expert in remaining_experts if remaining_choices * popularity[expert] > total
        }
        if not full:
            break
        remaining_experts -= full
        remaining_choices -= len(full)
    return inclusion


def draw_experts(generator: Generator, step: int, first: int, count: int) -> ExpertIds:
    """Return k different experts for each of ``count`` tokens of a step's global batch.

    ``first`` is the number of the first token in the batch.
    """
    length = count_run_tokens(generator.experts)
    intervals = _make_intervals(compute_inclusion(generator), generator.top_k, length * _SPACING)
    first_run = first // length
    end_run = -(-(first + count) // length)
    expert_ids: ExpertIds = []
    for run in range(first_run, end_run):
        expert_ids.extend(_draw_run(generator, step, run, intervals))
    offset = first % length
    return expert_ids[offset : offset + count]


def count_run_tokens(experts: int) -> int:
    """Return the tokens of a run, a multiple of the experts, so that balanced loads are equal."""
    return experts * -(-_RUN_TOKENS // experts)


def _draw_run(generator: Generator, step: int, run: int, intervals: Sequence[int]) -> ExpertIds:
    length = count_run_tokens(generator.experts)
    random_run = random.Random(f"{generator.seed} {step} {run}")
    order = list(range(generator.experts))
    random_run.shuffle(order)
    interval_ends = list(accumulate(intervals[expert] for expert in order))
    start = random_run.randrange(_SPACING)
    # A stride that visits all places of a run also spreads the tokens of a part of a run.
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, length) > 1:
        stride += 1
    expert_ids = []
    for token in range(length):
        place = start + token * stride % length * _SPACING
        marks = [place + length * _SPACING * choice for choice in range(generator.top_k)]
        expert_ids.append(tuple(order[bisect_right(interval_ends, mark)] for mark in marks))
    return expert_ids


def _make_intervals(inclusion: Sequence[float], top_k: int, unit: int) -> list[int]:
    """Return inclusions as integers in units of 1 / ``unit`` that sum to ``top_k * unit``.

    An exact sum leaves no token without an expert.
    """
    intervals = [min(unit, math.floor(share * unit + 1e-6)) for share in inclusion]
    missing = top_k * unit - sum(intervals)
    by_remainder = sorted(
        range(len(inclusion)), key=lambda expert: intervals[expert] - inclusion[expert] * unit
    )
    extendable = [expert for expert in by_remainder if 0 < intervals[expert] < unit]
    for expert in extendable[:missing]:
        intervals[expert] += 1
    return intervals


def compute_imbalance(loads: Sequence[float]) -> float | None:
    """Return max / mean, None without load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None
