"""The rule names a device that is slow in every repetition, and rarely one that is not."""

import math
import random

import pytest

from parbench.bench.check.rule import Gap, compute_gaps

THRESHOLD = 0.05
NORMAL = [100.0, 101.0, 100.0]
SLOW = [88.0, 89.0, 88.5]
# Repetitions that differ as much as the devices.
NOISY = [
    [100.0, 140.0, 70.0],
    [130.0, 80.0, 100.0],
    [80.0, 110.0, 90.0],
    [95.0, 130.0, 75.0],
]


def number_rates(*rates: list[float]) -> dict[int, dict[int, float]]:
    """Return rates by device and repetition."""
    return {
        device: dict(enumerate(by_repetition)) for device, by_repetition in enumerate(rates)
    }


def list_gaps(*rates: list[float]) -> list[Gap]:
    """Return each device's gap in one quantity, from its rates in the repetitions."""
    gaps = compute_gaps({"copy": number_rates(*rates)}, THRESHOLD)
    return [gaps["copy", device] for device in range(len(rates))]


def test_rule_names_slow_device() -> None:
    by_device = list_gaps(NORMAL, NORMAL, SLOW, NORMAL)
    assert [gap.is_under for gap in by_device] == [False, False, True, False]
    assert by_device[2].share == pytest.approx(0.12, abs=0.01)
    assert by_device[2].sigmas > 4


def test_rule_names_slow_device_of_two() -> None:
    normal, slow = list_gaps(NORMAL, SLOW)
    assert not normal.is_under
    assert slow.is_under


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([96.0, 97.0, 96.0], id="within the threshold"),
        pytest.param([80.0, 60.0, 100.0], id="slow in two repetitions of three"),
    ],
)
def test_rule_names_no_device(rates: list[float]) -> None:
    for gap in list_gaps(NORMAL, NORMAL, rates):
        assert not gap.is_under


def test_gap_needs_peers_and_three_repetitions() -> None:
    assert compute_gaps({"copy": number_rates(SLOW)}, THRESHOLD) == {}
    too_few = number_rates([100.0, 100.0], [50.0, 50.0])
    assert compute_gaps({"copy": too_few}, THRESHOLD) == {}


def test_device_without_a_repetition_keeps_none_from_comparison() -> None:
    gaps = compute_gaps({"copy": number_rates(NORMAL, NORMAL, SLOW, NORMAL[:2])}, THRESHOLD)
    assert gaps["copy", 2].is_under
    assert not gaps["copy", 0].is_under
    assert ("copy", 3) not in gaps


def test_noise_raises_threshold() -> None:
    slow = list_gaps(*NOISY, [80.0, 85.0, 60.0])[4]
    assert not slow.is_under


def test_noise_of_most_quantities_counts_for_all() -> None:
    quiet = number_rates(NORMAL, NORMAL, NORMAL, SLOW)
    noisy = number_rates(*NOISY)
    quiet_gaps = compute_gaps({"copy": quiet, "gemm": quiet}, THRESHOLD)
    assert quiet_gaps["copy", 3].is_under
    mixed_gaps = compute_gaps({"copy": quiet, "a": noisy, "b": noisy}, THRESHOLD)
    assert not mixed_gaps["copy", 3].is_under


def draw_rate(draw: random.Random, level: float, noise: float) -> float:
    """Return a rate, of which a tenth are disturbed: slower by five times the noise."""
    if draw.random() > 0.1:
        return math.exp(level + draw.gauss(0, noise))
    return math.exp(level - abs(draw.gauss(0, 5 * noise)))


def simulate(
    num_devices: int, noise: float, slow: float, num_checks: int
) -> tuple[float, float]:
    """Return the share of checks that name a good device, and that name device 0.

    Devices differ by 1 % (standard deviation) and repetitions by 10 %, in nine quantities.
    Device 0 is slower by ``slow``.
    """
    draw = random.Random(num_devices)
    false_alarms = 0
    detections = 0
    for _ in range(num_checks):
        quantities = {}
        for name in "abcdefghi":
            repetitions = [draw.gauss(0, 0.1) for _ in range(3)]
            rates = []
            for device in range(num_devices):
                level = draw.gauss(0, 0.01)
                if device == 0:
                    level -= slow
                rates.append(
                    [draw_rate(draw, level + repetition, noise) for repetition in repetitions]
                )
            quantities[name] = number_rates(*rates)
        gaps = compute_gaps(quantities, THRESHOLD)
        named = {device for (_, device), gap in gaps.items() if gap.is_under}
        if 0 in named:
            detections += 1
        if slow:
            named.discard(0)
        if named:
            false_alarms += 1
    return false_alarms / num_checks, detections / num_checks


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize(
    ("noise", "slow"),
    [
        (0.05, 0.0),
        (0.1, 0.0),
        (0.005, 0.2),
        (0.02, 0.2),
    ],
)
def test_rates_of_false_alarms_and_detections(
    num_devices: int, noise: float, slow: float
) -> None:
    false_alarms, detections = simulate(num_devices, noise, slow, num_checks=250)
    assert false_alarms < 0.01
    assert detections > 0.95 or not slow
