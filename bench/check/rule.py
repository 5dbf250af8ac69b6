"""Which of like devices is under its peers: by robust statistics, and where launches agree. Pure.

A device's level in a launch is the logarithm of its rate over the median of the others' in the same launch, so that
what slows a launch as a whole counts for nothing. It is under its peers if its median level is so by more than a floor,
and by more than four times what its peers and its own launches scatter. Then it was so in every launch, for none of n
values is farther from their mean than (n - 1) / sqrt(n) standard deviations (Samuelson's inequality).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TypeVar

from parbench.bench.results.stats import median

MADS = 4.0
LEAST_LAUNCHES = 3  # in which a device can be called slower
_NORMAL = 1.4826  # a normal's standard deviation over its median absolute deviation
_LEAST_SCATTER = 0.003
D = TypeVar("D", bound=Hashable)
Rates = Mapping[D, Sequence[float]]  # by device: one for each launch, in the same order


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far a device is under its peers: ``share`` of their rate (negative above), in ``mads`` of scatter.

    ``least`` is the share from which it would have been called so.
    """

    share: float
    mads: float
    least: float
    is_under: bool


def gaps(quantities: Mapping[str, Rates[D]], floor: float) -> dict[tuple[str, D], Gap]:
    """Return the gap of each quantity and device that has peers, in at least three launches.

    Launches scatter in all quantities alike where other work is the cause: the median of it counts for each.
    """
    levels = {name: _levels(rates) for name, rates in quantities.items()}
    told = [stdev(one) for own in levels.values() for one in own.values() if len(one) >= LEAST_LAUNCHES]
    usual = median(told) if told else 0.0
    found = {}
    for name, own in levels.items():
        for device, level in own.items():
            if len(level) >= LEAST_LAUNCHES:
                scatter = max(_scatter_of_peers(quantities[name], device), stdev(level), usual, _LEAST_SCATTER)
                found[name, device] = _gap(level, scatter, floor)
    return found


def _gap(level: Sequence[float], scatter: float, floor: float) -> Gap:
    value, needed = -median(level), max(-math.log1p(-floor), MADS * scatter)
    least, share = (-math.expm1(-one) for one in (needed, value))
    return Gap(share=share, mads=value / scatter, least=least, is_under=value > needed)


def _levels(rates: Rates[D]) -> dict[D, list[float]]:
    if len(rates) < 2:
        return {}
    found = {}
    for device, own in rates.items():
        others = [other for name, other in rates.items() if name != device]
        found[device] = [
            math.log(rate / median(at_once)) for rate, *at_once in zip(own, *others, strict=True) if rate > 0
        ]
    return found


def _scatter_of_peers(rates: Rates[D], device: D) -> float:
    """Return how peers scatter among themselves in a launch, as of a normal; 0 where they are too few to tell."""
    others = [other for name, other in rates.items() if name != device]
    if len(others) < 3:
        return 0.0
    apart = []
    for at_once in zip(*others, strict=True):
        middle = median(at_once)
        apart += [abs(math.log(rate / middle)) for rate in at_once]
    return _NORMAL * median(apart)
