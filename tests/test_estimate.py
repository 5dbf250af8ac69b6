"""What a sweep is expected to take, in seconds of points and jobs and in node-hours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.estimate import START_SECONDS, about, estimate, job_seconds, point_seconds, table
from slurm.points import Point, make_point


def point(nodes: int = 2, seconds: float = 100.0, repeat: int = 1) -> Point:
    return make_point(
        nodes=nodes,
        ntasks_per_node=1,
        placement="block",
        repeat=repeat,
        environment="",
        variables={},
        cases=(),
        seconds=seconds,
    )


def test_a_point_takes_its_budget_and_the_start_beside_it() -> None:
    assert point_seconds(95) == 95 + START_SECONDS


def test_one_allocation_holds_its_largest_number_of_nodes_for_all_its_time() -> None:
    points = (point(4, 900), point(2, 900), point(1, 1800))
    found = estimate(points, "one")
    assert (found.points, found.jobs, found.seconds, found.node_seconds) == (3, 1, 3600, 4 * 3600)
    assert found.text == "3 points in 1 job, about 60 min, 4 node-hours"


def test_jobs_of_their_own_hold_what_their_points_need() -> None:
    points = (point(4, 900), point(2, 900), point(2, 900, repeat=2))
    array, each = estimate(points, "array"), estimate(points, "each")
    assert array.node_seconds == each.node_seconds == 8 * 900
    assert (array.jobs, each.jobs) == (2, 3)
    assert array.text == "3 points in 2 jobs, about 45 min, 2 node-hours"


def test_one_point_is_told_as_one() -> None:
    assert estimate((point(1, 36),), "each").text == "1 point in 1 job, about 36 s, 0.01 node-hours"


@given(st.lists(st.floats(1, 1e5), min_size=1), st.booleans())
def test_a_job_asks_for_whole_minutes_and_more_than_its_work(seconds: list[float], at_once: bool) -> None:
    asked = job_seconds([point(seconds=one) for one in seconds], at_once=at_once)
    work = max(seconds) if at_once else sum(seconds)
    assert asked % 60 == 0
    assert work * 1.2 + 60 < asked + 1 <= work * 1.25 + 121


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(16, "16 s"), (119, "1 min 59 s"), (120, "2 min"), (3600, "60 min"), (3 * 3600, "3.0 h"), (100 * 3600, "100.0 h")],
)
def test_a_guess_is_told_as_coarsely_as_it_deserves(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_the_table_has_a_line_for_each_point_in_columns() -> None:
    points = (point(16, 1800), point(1, 36))
    head, first, second = table(points)
    assert head.split() == ["point", "label", "time", "node-hours"]
    assert first.split() == [points[0].id, "16", "nodes", "x", "1", "30", "min", "8"]
    assert second.split() == [points[1].id, "1", "node", "x", "1", "36", "s", "0.01"]
    assert len({len(line) for line in (head, first, second)}) == 1
