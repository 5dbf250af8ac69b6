"""The rule names a device that is slow in every launch, and rarely one that is not."""

import math
import random

import pytest

from parbench.bench.check.rule import Gap, gaps

FLOOR = 0.05
NORMAL = [100.0, 101.0, 100.0]
SLOW = [88.0, 89.0, 88.5]
# Launches that differ as much as the devices.
NOISY = [
    [100.0, 140.0, 70.0],
    [130.0, 80.0, 100.0],
    [80.0, 110.0, 90.0],
    [95.0, 130.0, 75.0],
]


def compute_gaps(*rates: list[float]) -> dict[int, Gap]:
    """Return each device's gap in one quantity, from its rates in the launches."""
    by_device = dict(enumerate(rates))
    return {device: gap for (_, device), gap in gaps({"copy": by_device}, FLOOR).items()}


def find_slow(*rates: list[float]) -> list[int]:
    return [device for device, gap in compute_gaps(*rates).items() if gap.is_under]


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        pytest.param([NORMAL, NORMAL, SLOW, NORMAL], [2], id="one of four"),
        pytest.param([NORMAL, SLOW], [1], id="one of two"),
        pytest.param([NORMAL, [96.0, 97.0, 96.0]], [], id="within the floor"),
        pytest.param([[100.0, 50.0, 100.0], [101.0, 50.0, 100.0]], [], id="slow launch"),
        pytest.param([NORMAL, NORMAL, [100.0, 60.0, 100.0]], [], id="slow once"),
        pytest.param([NORMAL, NORMAL, [80.0, 60.0, 100.0]], [], id="slow twice"),
        pytest.param([*NOISY, [80.0, 85.0, 60.0]], [], id="hidden by noise"),
        pytest.param([NORMAL], [], id="no peers"),
        pytest.param([[100.0, 100.0], [50.0, 50.0]], [], id="two launches"),
    ],
)
def test_rule_names_device_slow_in_every_launch(rates: list[list[float]], slow: list[int]) -> None:
    assert find_slow(*rates) == slow


def test_gap_has_share_and_threshold() -> None:
    by_device = compute_gaps(NORMAL, NORMAL, SLOW, NORMAL)
    assert by_device[2].share == pytest.approx(0.12, abs=0.01)
    assert by_device[2].mads > 4
    assert by_device[2].least == pytest.approx(FLOOR, abs=0.005)


def test_noise_raises_threshold() -> None:
    assert compute_gaps(*NOISY, [80.0, 85.0, 60.0])[4].least > 0.5


def test_noise_of_most_quantities_counts_for_all() -> None:
    quiet = dict(enumerate([NORMAL, NORMAL, NORMAL, SLOW]))
    noisy = dict(enumerate(NOISY))
    quiet_gaps = gaps({"copy": quiet, "gemm": quiet}, FLOOR)
    assert [key for key, gap in quiet_gaps.items() if gap.is_under] == [("copy", 3), ("gemm", 3)]
    mixed_gaps = gaps({"copy": quiet, "a": noisy, "b": noisy}, FLOOR)
    assert not any(gap.is_under for gap in mixed_gaps.values())


def draw_rate(draw: random.Random, level: float, noise: float) -> float:
    """Return a rate, of which a tenth are disturbed: slower by five times the noise."""
    if draw.random() > 0.1:
        return math.exp(level + draw.gauss(0, noise))
    return math.exp(level - abs(draw.gauss(0, 5 * noise)))


def simulate(num_devices: int, noise: float, slow: float, num_checks: int) -> tuple[float, float]:
    """Return the share of checks that name a good device, and that name device 0.

    Devices differ by 1 % (standard deviation) and launches by 10 %, in nine quantities.
    Device 0 is slower by ``slow``.
    """
    draw = random.Random(num_devices)
    false_alarms = 0
    detections = 0
    for _ in range(num_checks):
        quantities = {}
        for name in "abcdefghi":
            launches = [draw.gauss(0, 0.1) for _ in range(3)]
            rates = {}
            for device in range(num_devices):
                level = draw.gauss(0, 0.01) - (slow if device == 0 else 0.0)
                rates[device] = [draw_rate(draw, level + launch, noise) for launch in launches]
            quantities[name] = rates
        named = {device for (_, device), gap in gaps(quantities, FLOOR).items() if gap.is_under}
        detections += 0 in named
        false_alarms += bool(named - {0} if slow else named)
    return false_alarms / num_checks, detections / num_checks


def test_simulated_good_devices_are_not_named() -> None:
    false_alarms, _ = simulate(4, noise=0.1, slow=0.0, num_checks=40)
    assert false_alarms == 0


def test_simulated_slow_device_is_named() -> None:
    _, detections = simulate(4, noise=0.02, slow=0.2, num_checks=40)
    assert detections > 0.95


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05, 0.1])
def test_false_alarm_rate_is_below_one_percent(num_devices: int, noise: float) -> None:
    false_alarms, _ = simulate(num_devices, noise, slow=0.0, num_checks=250)
    assert false_alarms < 0.01


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_detection_rate_is_above_95_percent(num_devices: int, noise: float) -> None:
    false_alarms, detections = simulate(num_devices, noise, slow=0.2, num_checks=250)
    assert false_alarms < 0.01
    assert detections > 0.95
