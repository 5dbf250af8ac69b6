"""A measured floor is as high as its launches need and no higher, belongs to a series, and lies in a file."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.results.runs import Run
from parbench.bench.text import UserError
from parbench.reports.regression.environment import points_of
from parbench.reports.regression.noise_floor import (
    FALSE_ALARMS,
    Floor,
    _pairs,
    fingerprints,
    floors_of,
    keep_floors,
    measure_floors,
    read_floors,
)
from parbench.reports.regression.rule import Pair, Rule, effects, judge
from tests.support.compare_fixtures import CASE, OTHER_CASE, run_from_records
from tests.support.reports_fixtures import ENVIRONMENT, failed_record, ok_record

RULE = Rule()
FLOOR = Floor(
    series="a case",
    host="node-a",
    measured="2026-01-02T03:04:05.678Z",
    launches=10,
    noise=0.01,
    floor=0.031,
)


def noisy(seed: int, sigma: float, count: int = 20, rho: float = 0.0) -> list[float]:
    rng = random.Random(seed)
    found = [rng.gauss(0, 1)]
    for _ in range(count - 1):
        found.append(rho * found[-1] + math.sqrt(1 - rho * rho) * rng.gauss(0, 1))
    return [1e-3 * math.exp(sigma * value) for value in found]


def floor_of(seconds: Sequence[float], rule: Rule) -> float:
    [floor], autocorrelation = floors_of([dict(enumerate(seconds))], rule)
    assert autocorrelation == 0.0, "one series tells none"
    return floor


def called(seconds: Sequence[float], floor: float) -> float:
    rule = Rule(floor=floor)
    words = []
    for base, new in _pairs(range(len(seconds)), rule.min_launches):
        sides = ({i: seconds[i] for i in side} for side in (base, new))
        words.append(
            judge(effects([[Pair(base=next(sides), new=next(sides))]], rule)[1], rule)[0][0].word
        )
    return sum(word in ("SLOWER", "FASTER") for word in words) / len(words)


def launches(times: Sequence[float], cases: Sequence[Case] = (CASE,)) -> list[Run]:
    return [
        run_from_records([ok_record(case, 0, seconds) for case in cases], ENVIRONMENT)
        for seconds in times
    ]


def moved_level() -> list[float]:
    return [*noisy(1, 0.002, 10), *(1.1 * value for value in noisy(2, 0.002, 10))]


def test_floor_covers_a_moving_level() -> None:
    assert floor_of(noisy(1, 0.003), RULE) == RULE.floor
    assert floor_of([1e-3] * 10, RULE) == RULE.floor
    moved = moved_level()
    floor = floor_of(moved, RULE)
    assert floor == pytest.approx(0.1, abs=0.004)
    assert round(1000 * floor, 9) == round(1000 * floor), "a tenth of a percent, rounded up"
    assert floor_of(moved[::-1], RULE) == pytest.approx(floor), "whichever way it moved"
    assert floor_of([1 / value for value in moved], RULE) == pytest.approx(floor)
    line = [1.03**i for i in range(10)]
    assert called(line, RULE.floor) == 0
    assert floor_of(line, RULE) == RULE.floor, "what the gate takes for drift needs none"


def test_floor_is_the_least_without_false_alarms() -> None:
    low = Rule(floor=0.001)
    for seed in (0,):
        seconds = [*noisy(seed, 0.004), *(1.02 * value for value in noisy(seed + 50, 0.004))]
        floor = floor_of(seconds, low)
        assert floor > 0.01
        assert called(seconds, floor) <= FALSE_ALARMS, seed
        assert called(seconds, floor - 0.0025) > FALSE_ALARMS, seed


def test_pairs_never_share_a_repetition() -> None:
    pairs = [(list(base), list(new)) for base, new in _pairs(range(1, 13), 5)]
    assert {len(side) for pair in pairs for side in pair} == {5, 6}
    assert all(len(base) == len(new) and not set(base) & set(new) for base, new in pairs)
    assert ([1, 4, 5, 8, 9], [2, 3, 6, 7, 10]) in pairs, "dealt as ABBA"
    assert ([1, 2, 3, 4, 5], [8, 9, 10, 11, 12]) in pairs, "one after the other"


def test_measure_floors_uses_series_fingerprints() -> None:
    runs = launches(noisy(3, 0.01), (CASE, OTHER_CASE))
    floors, autocorrelation = measure_floors(runs, RULE)
    assert 0 <= autocorrelation < 1
    assert set(floors) == {point.series.fingerprint for point in points_of(runs[0])}
    assert set(floors) == set(fingerprints(runs[0]).values())
    assert {one.series for one in floors.values()} == {CASE.label, OTHER_CASE.label}
    [first, _] = floors.values()
    assert (first.launches, first.host, first.measured) == (20, "node-a", runs[-1].info.started)
    assert first.noise == pytest.approx(0.01, rel=0.35)
    assert first.floor == floor_of(noisy(3, 0.01), RULE)
    host = {**ENVIRONMENT["host"], "name": "node-b"}  # type: ignore[dict-item]
    other = run_from_records([ok_record(CASE)], {**ENVIRONMENT, "host": host})
    assert set(fingerprints(other)) == {CASE.id}
    assert fingerprints(other) != fingerprints(launches([1e-3])[0]), (
        "another machine is another series"
    )


def test_measure_floors_needs_ten_valid_runs() -> None:
    assert measure_floors(launches(noisy(1, 0.01, 9)), RULE) == ({}, 0.0)
    runs = [
        *launches(noisy(1, 0.01, 10)),
        run_from_records([failed_record(CASE, 0, "wrong")], ENVIRONMENT),
    ]
    [found] = measure_floors(runs, RULE)[0].values()
    assert found.launches == 10
    assert measure_floors([*runs[:9], runs[-1]], RULE) == ({}, 0.0)


def test_keep_floors_updates_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "floor.json"
    keep_floors(file, {"a": FLOOR, "b": FLOOR})
    newer = msgspec.structs.replace(FLOOR, floor=0.05)
    keep_floors(file, {"b": newer})
    assert read_floors(file) == {"a": FLOOR, "b": newer}
    assert [one.name for one in file.parent.iterdir()] == ["floor.json"], "nothing half written"
    assert json.loads(file.read_text())["schema_version"] == 1


def test_floor_files_of_others_are_refused(tmp_path: Path) -> None:
    no_floors = "holds no floors as parbench aa writes them"
    contents = {
        "": no_floors,
        '{"schema_version": 1}': no_floors,
        '{"schema_version": 1, "floors": {"a": 3}}': no_floors,
        '{"schema_version": 2, "floors": {}}': "has schema 2, which is newer than 1",
    }
    file = tmp_path / "floor.json"
    for content, why in contents.items():
        file.write_text(content)
        with pytest.raises(UserError, match=why):
            read_floors(file)
        with pytest.raises(UserError, match=why):
            keep_floors(file, {"a": FLOOR})
        assert file.read_text() == content
    with pytest.raises(UserError, match=r"no such file: .*absent; parbench aa measures"):
        read_floors(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot be written"):
        keep_floors(file / "floor.json", {"a": FLOOR})
