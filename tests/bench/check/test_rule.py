"""The rule names a slow device, not a slow launch, and hardly ever a device that is like its peers."""

import math
import random

import pytest

from parbench.bench.check.rule import LEAST_LAUNCHES, Gap, gaps

FLOOR = 0.05


def one(*rates: tuple[float, ...]) -> dict[int, Gap]:
    return {
        device: gap for (_, device), gap in gaps({"copy": dict(enumerate(rates))}, FLOOR).items()
    }


def under(*rates: tuple[float, ...]) -> list[int]:
    return [device for device, gap in one(*rates).items() if gap.is_under]


def test_a_device_is_named_that_is_slower_in_every_launch_also_of_two() -> None:
    fine, slow = (100.0, 101.0, 100.0), (88.0, 89.0, 88.5)
    assert under(fine, fine, slow, fine) == [2]
    assert under(fine, slow) == [1]
    gap = one(fine, fine, slow, fine)[2]
    assert gap.share == pytest.approx(0.12, abs=0.01)
    assert gap.mads > 4
    assert gap.least == pytest.approx(FLOOR, abs=0.005)
    assert one(fine, slow)[0].share == pytest.approx(1 - 100 / 88.5, abs=0.01), "above its peers"
    assert under(fine, (96.0, 97.0, 96.0)) == [], "which is within the floor"


def test_a_slow_launch_is_nobodys_and_one_bad_launch_of_a_device_is_not_its_own() -> None:
    assert under((100.0, 50.0, 100.0), (101.0, 50.0, 100.0), (99.0, 50.0, 101.0)) == []
    assert under((100.0, 100.0, 100.0), (100.0, 100.0, 100.0), (100.0, 60.0, 100.0)) == []
    assert under((100.0, 100.0, 100.0), (100.0, 100.0, 100.0), (80.0, 60.0, 100.0)) == []
    rng = random.Random(0)
    for _ in range(3000):  # what is named was slower in every launch
        own = tuple(rng.uniform(70, 101) for _ in range(3))
        assert max(own) < 100 or not one(*[(100.0, 100.0, 100.0)] * 3, own)[3].is_under, own


def test_what_scatters_as_much_hides_it_and_says_from_when_it_would_be_named() -> None:
    noisy = [(100.0, 140.0, 70.0), (130.0, 80.0, 100.0), (80.0, 110.0, 90.0), (95.0, 130.0, 75.0)]
    assert under(*noisy, (80.0, 85.0, 60.0)) == []
    assert one(*noisy, (80.0, 85.0, 60.0))[4].least > 0.5
    quiet = {
        name: dict(enumerate([(100.0, 101.0, 100.0)] * 3 + [(85.0, 86.0, 85.0)])) for name in "abc"
    }
    assert [key for key, gap in gaps(quiet, FLOOR).items() if gap.is_under] == [
        ("a", 3),
        ("b", 3),
        ("c", 3),
    ]
    loud = {name: dict(enumerate(noisy)) for name in "xyz"}
    assert not any(gap.is_under for gap in gaps({**quiet, **loud}, FLOOR).values()), (
        "launches scatter in all alike"
    )


def test_without_peers_or_with_few_launches_nothing_is_said() -> None:
    assert one((100.0, 100.0, 100.0)) == {}
    assert one((100.0, 100.0), (50.0, 50.0)) == {}
    assert LEAST_LAUNCHES == 3
    assert gaps({}, FLOOR) == {}


def named(
    n: int, noise: float, *, slow: float = 0.0, checks: int = 250, quantities: int = 9
) -> tuple[float, float]:
    """Return the share of checks that name a device that is fine, and that name the first.

    Devices differ by 1 % (a normal's sigma), launches by 10 %; of all values a tenth are disturbed, five times as far
    as the noise, and then slower.
    """
    rng, wrong, right = random.Random(n), 0, 0
    for _ in range(checks):
        rates = {}
        for name in map(str, range(quantities)):
            own, launches = (
                [rng.gauss(0, 0.01) for _ in range(n)],
                [rng.gauss(0, 0.1) for _ in range(3)],
            )
            rates[name] = {
                device: [
                    math.exp(
                        own[device] + level + _noise(rng, noise) - (slow if device == 0 else 0.0)
                    )
                    for level in launches
                ]
                for device in range(n)
            }
        found = {device for (_, device), gap in gaps(rates, FLOOR).items() if gap.is_under}
        wrong += bool(found - {0} if slow else found)
        right += 0 in found
    return wrong / checks, right / checks


def _noise(rng: random.Random, noise: float) -> float:
    return rng.gauss(0, noise) if rng.random() > 0.1 else -abs(rng.gauss(0, 5 * noise))


def test_the_rate_of_false_alarms_is_what_the_readme_says_and_a_slow_device_is_found() -> None:
    for n in (2, 8):
        for noise in (0.005, 0.02, 0.05, 0.1):
            assert named(n, noise)[0] <= 0.004, (n, noise)
        for noise in (0.005, 0.02):
            wrong, right = named(n, noise, slow=0.2)
            assert right > 0.98, (n, noise)
            assert wrong <= 0.004, (n, noise)
    assert named(8, 0.02, slow=0.1)[1] > 0.9
