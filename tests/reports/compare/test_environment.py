"""Differences of two runs' environments, and the series that a run measured."""

from typing import Any

import msgspec
import pytest

from parbench.reports.compare.environment import (
    SeriesPoint,
    collect_environment,
    collect_points,
    find_environment_changes,
)
from tests.support.reports.compare_fixtures import CASE, make_repetitions, run_from_records
from tests.support.reports.reports_fixtures import (
    ENVIRONMENT,
    WORLD,
    collective_case,
    make_plan,
    make_run,
    ok_record,
)

PLAN = make_plan([CASE])


def surround(shared: dict[str, Any], record: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the surroundings of a run that measured two records, the second in this one."""
    records = [ok_record(CASE, 0), ok_record(CASE, 1, environment=record or {})]
    return collect_environment(make_run(PLAN, records, shared), records)


NODE_A = {"host": {"name": "a"}}
NODE_B = {"host": {"name": "b"}}


@pytest.mark.parametrize(
    ("base", "new", "glob", "text", "is_blocking"),
    [
        (NODE_A, NODE_B, "", "host.name: a -> b", True),
        (NODE_A, NODE_B, "versions.*", "host.name: a -> b", True),
        (NODE_A, NODE_B, "host.*", "host.name: a -> b", False),
        (NODE_A, {"host": {"name": "\x1b[31m"}}, "", "host.name: a -> \\x1b[31m", True),
        ({}, {"variables": {"NCCL_ALGO": "R"}}, "", "variables.NCCL_ALGO: not set -> R", True),
        ({"gpu": {"uuid": "1"}}, {"gpu": {"uuid": "2"}}, "", "gpu.uuid: 1 -> 2", False),
        ({}, {"host": {"governor": "fast"}}, "", "host.governor: - -> fast", False),
    ],
)
def test_changed_value_blocks_unless_harmless_intended_or_unknown(
    base: dict[str, Any], new: dict[str, Any], glob: str, text: str, is_blocking: bool
) -> None:
    [change] = find_environment_changes(surround(base), surround(new), [glob])
    assert change.text == text
    assert change.is_blocking is is_blocking


def test_values_of_ranks_and_of_times_are_joined() -> None:
    ranks = {"rank 0": NODE_B, "rank 1": NODE_A}
    records = [ok_record(CASE, environment=ranks)]
    assert collect_environment(make_run(PLAN, records), records)["host.name"] == "a, b"
    moved = surround(NODE_A, {"changed": {"host.name": ["a", "b"]}})
    assert moved["host.name"] == "a then b"


def test_fault_is_shown_and_does_not_block() -> None:
    records = [ok_record(CASE, injected="slow:1:10%")]
    other_records = [ok_record(CASE)]
    base, new = (
        collect_environment(make_run(PLAN, side), side) for side in (records, other_records)
    )
    changes = find_environment_changes(base, new)
    assert [change.text for change in changes] == ["injected: slow:1:10% -> -"]
    assert not any(change.is_blocking for change in changes)


def with_value(path: str, value: object) -> dict[str, Any]:
    group, _, name = path.partition(".")
    environment: dict[str, Any] = {**ENVIRONMENT}
    environment[group] = {**environment.get(group, {}), name: value}
    return environment


def find_point(environment: dict[str, Any] | None = None, **fields: Any) -> SeriesPoint:
    [point] = collect_points(run_from_records(make_repetitions(**fields), environment))
    return point


@pytest.mark.parametrize(
    "point",
    [
        find_point(with_value("torch.version", "another")),
        find_point(with_value("variables.NCCL_ALGO", "another")),
        find_point(world=msgspec.structs.replace(WORLD, nodes=2)),
        find_point(case=collective_case(size_bytes=2048)),
        find_point(injected="late:1:3ms"),
    ],
)
def test_incomparable_times_have_another_fingerprint(point: SeriesPoint) -> None:
    assert point.series.fingerprint != find_point().series.fingerprint


@pytest.mark.parametrize("path", ["host.kernel", "versions.numpy", "gpu.driver"])
def test_explaining_value_keeps_the_fingerprint(path: str) -> None:
    point = find_point(with_value(path, "another"))
    assert point.series.fingerprint == find_point().series.fingerprint
    assert point.explanatory_values[path] == "another"
