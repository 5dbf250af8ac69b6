"""Scaling: steps should grow as the ranks do, bus bandwidth should stay; groups and single worlds are left out."""

import msgspec
import pytest
from reports_fixtures import WORLD, collective, make_plan, make_run, ok, step

from bench.cases import Case
from reports.scaling import Scaled, scaled, worlds
from reports.summary import Row, summarize


def row(case: Case, ranks: int, seconds: float = 1e-3) -> Row:
    record = ok(case, seconds=seconds, world=msgspec.structs.replace(WORLD, size=ranks))
    (found,) = summarize(make_run(make_plan([case]), [record])).rows
    return found


def one(*rows: Row) -> Scaled:
    (found,) = scaled(rows)
    return found


def test_a_step_that_keeps_its_time_trains_ranks_times_the_tokens() -> None:
    same = one(row(step(), 2), row(step(), 8))
    assert same.speed_up(8) == pytest.approx(1.0)
    assert same.efficiency(8) == pytest.approx(0.25)  # the fixture's tokens are those of all ranks together
    faster = one(row(step(), 2), row(step(), 8, 0.25e-3))
    assert faster.speed_up(8) == pytest.approx(4.0)
    assert faster.efficiency(8) == pytest.approx(1.0)


def test_bus_bandwidth_should_stay() -> None:
    kept = one(row(collective(), 2), row(collective(), 8, 2e-3))
    assert kept.speed_up(8) == kept.efficiency(8) == pytest.approx(0.5)


def test_the_smallest_world_is_the_base_in_whatever_order() -> None:
    found = one(row(step(), 8, 2e-3), row(step(), 4), row(step(), 2))
    assert found.first.world.size == 2
    assert found.efficiency(2) == pytest.approx(1.0)
    assert worlds([found]) == (2, 4, 8)


def test_what_is_unknown_has_no_efficiency() -> None:
    found = one(row(step(), 2), row(step(), 4))
    assert found.rate(3) is None
    assert found.efficiency(3) is None


def test_one_world_scales_nowhere_and_groups_are_no_worlds() -> None:
    assert scaled([row(step(), 2), row(step(), 2)]) == ()
    assert scaled([row(collective(group="pairs"), n) for n in (2, 4)]) == ()


def test_of_one_world_the_first_run_counts() -> None:
    found = one(row(step(), 2, 1e-3), row(step(), 2, 9e-3), row(step(), 4))
    assert found.rows[2].value("step_time") == pytest.approx(1e-3)
