"""Robust statistics that find devices which are slower than their peers.

The peers of a device are the other devices of its kind, such as GPUs of the same model. The level
of a device in a repetition is the logarithm of its rate, minus the median of such logarithms of its
peers in the same repetition. So a disturbance that slows all devices of a repetition has no effect.
A device is slower than its peers if the median of its levels over the repetitions is negative by
more than a threshold, and by more than four times the variation among its peers and among its own
repetitions. Then it is slower in every repetition, because none of n values is farther from their
mean than (n - 1) / sqrt(n) standard deviations (Samuelson's inequality).

A device with fewer than three repetitions is not compared, and is not a peer of other devices. So
the peers of a device are the same in each repetition.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

MIN_SIGMAS = 4.0
"""The least ``Gap.sigmas`` of a slow device."""
MIN_REPETITIONS = 3
"""The least number of repetitions of a device that is compared with its peers."""
# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_MIN_VARIATION = 0.003  # of logarithms of rates
D = TypeVar("D", bound=Hashable)
Array = npt.NDArray[np.float64]
"""The levels of a device, one for each repetition.

A level is the logarithm of the device's rate divided by the median rate of its peers.
"""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The amount by which one rate of a device is lower than the rate of its peers.

    Peers are the other devices of its kind. In each repetition, the rate of the device is compared
    with the median rate of its peers in that repetition. The gap is the median over the
    repetitions.
    """

    share: float
    """The fraction of the peers' rate that the device lacks.

    0.1 means that the device is 10 % slower. The value is negative if the device is faster.
    """
    sigmas: float
    """The gap in standard deviations of the normal variation of rates. A slow device has over 4.

    The gap is here the logarithm of the peers' rate divided by the device's rate. The unit is the
    largest of four numbers: the standard deviation of such logarithms among the peers, among the
    repetitions of the device, and among the repetitions of a typical device, and 0.003.
    """
    is_under: bool
    """True if the device is slow: ``share`` exceeds the threshold of the check, and ``sigmas`` 4."""


def compute_gaps(
    quantities: Mapping[str, Mapping[D, Mapping[int, float]]], threshold: float
) -> dict[tuple[str, D], Gap]:
    """Return the gap between each rate of each device and the median rate of its peers.

    A quantity is the name of a rate, such as ``copy`` for copy bandwidth. ``quantities`` holds the
    rates (in any unit) by quantity, by device and by number of the repetition. The peers of a
    device are all other devices with this quantity. ``threshold`` is the fraction of the peers'
    rate that a device must lack to be slow. The result holds a ``Gap`` for each key (quantity,
    device). Devices with fewer than three repetitions and devices without peers are left out.

    Other work on a host makes all its rates vary. So the variation between the repetitions of a
    device counts as at least the median of such variations over all devices and quantities.
    """
    levels: dict[tuple[str, D], Array] = {}
    peer_variations: dict[tuple[str, D], float] = {}
    for name, rates in quantities.items():
        logarithms = {
            device: np.log([by_repetition[repetition] for repetition in sorted(by_repetition)])
            for device, by_repetition in rates.items()
            if len(by_repetition) >= MIN_REPETITIONS
        }
        for device, own_logarithms in logarithms.items():
            peers = np.array([logarithms[peer] for peer in logarithms if peer != device])
            if len(peers) == 0:
                continue
            peer_medians = np.median(peers, axis=0)
            levels[name, device] = own_logarithms - peer_medians
            distance = float(np.median(np.abs(peers - peer_medians)))
            peer_variations[name, device] = _NORMAL * distance
    variations = {key: float(np.std(level, ddof=1)) for key, level in levels.items()}
    typical_variation = float(np.median(list(variations.values()))) if variations else 0.0
    gaps = {}
    for key, level in levels.items():
        variation = max(peer_variations[key], variations[key], typical_variation, _MIN_VARIATION)
        limit = max(-math.log1p(-threshold), MIN_SIGMAS * variation)
        drop = -float(np.median(level))
        share = -math.expm1(-drop)
        gaps[key] = Gap(share=share, sigmas=drop / variation, is_under=drop > limit)
    return gaps
