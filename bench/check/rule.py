"""Robust statistics that find devices which are slower than their peers. Pure.

The level of a device in a repetition is the logarithm of its rate over the median rate of its peers
in the same repetition. So a disturbance that slows all devices of a repetition has no effect. A
device is slower than its peers if its median level is lower by more than a threshold, and by more
than four times the variation among its peers and among its own repetitions. Then it is slower in
every repetition, because none of n values is farther from their mean than (n - 1) / sqrt(n)
standard deviations (Samuelson's inequality).

A device with fewer than three repetitions is not compared, and is not a peer. So it keeps no other
device from comparison, and the peers of a device are the same in each repetition.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

MADS = 4.0
MIN_REPETITIONS = 3  # fewer do not show that a device is slower
# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_MIN_VARIATION = 0.003
_MIN_PEERS = 3  # fewer do not show how peers vary
D = TypeVar("D", bound=Hashable)
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference between the rate of a device and the median rate of its peers."""

    share: float
    """The share of the peers' rate that the device lacks, negative if the device is faster."""
    mads: float
    """The gap as the difference of logarithms, in units of the variation."""
    is_under: bool
    """True if the device is slower than its peers."""


def compute_gaps(
    quantities: Mapping[str, Mapping[D, Mapping[int, float]]], threshold: float
) -> dict[tuple[str, D], Gap]:
    """Return the gap of each device in each quantity to its peers, keyed by (quantity, device).

    ``quantities`` holds rates by quantity, device and repetition. ``threshold`` is the smallest
    share that counts as slower. Other work on a host makes all quantities vary alike. So the
    variation of a device's repetitions is at least the median over all devices and quantities.
    """
    levels: dict[tuple[str, D], Table] = {}
    peer_variations: dict[tuple[str, D], float] = {}
    for name, rates in quantities.items():
        devices = [
            device
            for device, by_repetition in rates.items()
            if len(by_repetition) >= MIN_REPETITIONS
        ]
        repetitions = sorted({repetition for device in devices for repetition in rates[device]})
        table = np.array([[rates[device][r] for r in repetitions] for device in devices])
        for row, device in enumerate(devices):
            peers = np.delete(table, row, axis=0)
            if len(peers) > 0:
                levels[name, device] = np.log(table[row] / np.median(peers, axis=0))
                peer_variations[name, device] = _compute_peer_variation(peers)
    variations = {}
    for key, level in levels.items():
        variations[key] = float(np.std(level, ddof=1))
    typical_variation = float(np.median([*variations.values()])) if variations else 0.0
    gaps = {}
    for key, level in levels.items():
        limits = (peer_variations[key], variations[key], typical_variation, _MIN_VARIATION)
        gaps[key] = _make_gap(float(np.median(level)), max(limits), threshold)
    return gaps


def _make_gap(level: float, variation: float, threshold: float) -> Gap:
    """Return the gap from the logarithms of a rate relative to peers and of its variation."""
    limit = max(-math.log1p(-threshold), MADS * variation)
    return Gap(
        share=-math.expm1(level),
        mads=-level / variation,
        is_under=-level > limit,
    )


def _compute_peer_variation(peers: Table) -> float:
    """Return the standard deviation of logarithms of rates among peers within a repetition.

    The result is 0 if there are too few peers.
    """
    if len(peers) < _MIN_PEERS:
        return 0.0
    distances = np.abs(np.log(peers / np.median(peers, axis=0)))
    return _NORMAL * float(np.median(distances))
