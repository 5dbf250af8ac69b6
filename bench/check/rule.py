"""Robust statistics that find devices which are slower than their peers. Pure.

The level of a device in a repetition is the logarithm of its rate over the median rate of its peers in the same
repetition. So a disturbance that slows all devices of a repetition has no effect. A device is slower than its peers if
its median level is lower by more than a threshold, and by more than four times the variation among its peers and among
its own repetitions. Then it is slower in every repetition, because none of n values is farther from their mean than
(n - 1) / sqrt(n) standard deviations (Samuelson's inequality).

A device with fewer than three repetitions is not compared, and is not a peer. So it keeps no other device from
comparison, and the peers of a device are the same in each repetition.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TypeVar

from parbench.bench.results.stats import median

MADS = 4.0
MIN_REPETITIONS = 3  # fewer do not show that a device is slower
# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_MIN_VARIATION = 0.003
_MIN_PEERS = 3  # fewer do not show how peers vary
D = TypeVar("D", bound=Hashable)
Rates = Mapping[D, Mapping[int, float]]  # by device and repetition
Levels = dict[D, list[float]]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The distance of a device from its peers in one quantity."""

    share: float  # of the peers' rate that the device lacks, negative if it is faster
    mads: float  # the same in units of the variation
    least: float  # the smallest share that would be called slower
    is_under: bool  # whether the device is slower than its peers


def compute_gaps(quantities: Mapping[str, Rates[D]], threshold: float) -> dict[tuple[str, D], Gap]:
    """Compute the gap of each device in each quantity, from at least three repetitions.

    Other work on a host makes all quantities vary alike. So the variation of a device's repetitions
    is at least the median over all devices and quantities.
    """
    complete = {name: _select_complete(rates) for name, rates in quantities.items()}
    levels = {name: _compute_levels(rates) for name, rates in complete.items()}
    variations = [stdev(level) for by_device in levels.values() for level in by_device.values()]
    typical_variation = median(variations) if variations else 0.0
    gaps = {}
    for name, by_device in levels.items():
        for device, level in by_device.items():
            peers = [rates for peer, rates in complete[name].items() if peer != device]
            variation = max(_compute_peer_variation(peers), stdev(level), typical_variation, _MIN_VARIATION)
            gaps[name, device] = _make_gap(level, variation, threshold)
    return gaps


def _make_gap(level: Sequence[float], variation: float, threshold: float) -> Gap:
    distance = -median(level)
    needed = max(-math.log1p(-threshold), MADS * variation)
    return Gap(
        share=-math.expm1(-distance),
        mads=distance / variation,
        least=-math.expm1(-needed),
        is_under=distance > needed,
    )


def _select_complete(rates: Rates[D]) -> Rates[D]:
    return {device: own for device, own in rates.items() if len(own) >= MIN_REPETITIONS}


def _compute_levels(rates: Rates[D]) -> Levels[D]:
    """Compute the levels of each device that has peers in enough repetitions."""
    levels = {}
    for device, by_repetition in rates.items():
        level = []
        for repetition, rate in by_repetition.items():
            peers = [
                peer_rates[repetition]
                for peer, peer_rates in rates.items()
                if peer != device and repetition in peer_rates
            ]
            if peers and rate > 0:
                level.append(math.log(rate / median(peers)))
        if len(level) >= MIN_REPETITIONS:
            levels[device] = level
    return levels


def _compute_peer_variation(peers: Sequence[Mapping[int, float]]) -> float:
    """Compute the standard deviation among peers within a repetition, 0 where they are too few."""
    distances: list[float] = []
    for repetition in sorted({repetition for rates in peers for repetition in rates}):
        values = [rates[repetition] for rates in peers if repetition in rates]
        if len(values) >= _MIN_PEERS:
            middle = median(values)
            distances += [abs(math.log(value / middle)) for value in values]
    return _NORMAL * median(distances) if distances else 0.0
