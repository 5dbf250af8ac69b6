"""A run's points: the fingerprint changes with what makes times incomparable, and with nothing else."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.results.records import Status
from parbench.reports.history.entries import About, read_entry
from parbench.reports.regression.environment import Point, points_of
from tests.support.compare_fixtures import CASE, make_repetitions, run_from_records
from tests.support.history_fixtures import make_entry
from tests.support.reports_fixtures import ENVIRONMENT, WORLD, collective_case, failed_record

BESIDE = [f"host.{name}" for name in ("clock_source", "governor", "kernel", "os", "virtualised")]
BESIDE += ["versions.numpy", "versions.python", "gpu.driver", "gpu.power_limit_watts"]


def with_value(path: str, value: object) -> dict[str, Any]:
    group, _, name = path.partition(".")
    known: dict[str, dict[str, Any]] = {**ENVIRONMENT}  # type: ignore[dict-item]
    return {**known, group: {**known.get(group, {}), name: value}}


def point(environment: dict[str, Any] | None = None, **more: Any) -> Point:
    [found] = points_of(run_from_records(make_repetitions(**more), environment))
    return found


def test_a_point_is_the_launches_geometric_mean() -> None:
    found = point()
    assert found.seconds == pytest.approx(1e-3, rel=1e-3)
    assert (found.status, found.launches, found.series.case) == ("ok", 5, CASE)


def test_the_fingerprint_changes_with_what_makes_times_incomparable_and_with_nothing_else() -> None:
    usual = point()
    assert (usual.series.fingerprint, len(usual.series.fingerprint)) == (
        point().series.fingerprint,
        20,
    )
    another = "host.name host.cpu_model process.cores torch.version torch.gpu variables.NCCL_ALGO versions.parbench"
    prints = [point(with_value(path, "another")).series.fingerprint for path in another.split()]
    for world in (msgspec.structs.replace(WORLD, size=8), msgspec.structs.replace(WORLD, nodes=2)):
        prints.append(point(world=world).series.fingerprint)
    prints.append(point(case=collective_case(size_bytes=2048)).series.fingerprint)
    prints.append(point(injected="late:1:3ms").series.fingerprint)
    assert len({usual.series.fingerprint, *prints}) == len(prints) + 1, prints
    for path in (*BESIDE, "gpu.uuid", "host.boot_id", "variables.SLURM_JOB_ID", "slurm.job"):
        found = point(with_value(path, "other"))
        assert found.series.fingerprint == usual.series.fingerprint, path
        assert found.beside.get(path) == ("other" if path in BESIDE else None), (
            "what may explain a step"
        )
    assert usual.series.around["host.name"] == "node-a"


def test_the_family_shares_all_but_the_size() -> None:
    one, other = point(), point(case=collective_case(size_bytes=2048))
    assert one.series.family == other.series.family
    others = (point(case=collective_case("broadcast")), point(case=collective_case(dtype="int8")))
    assert all(one.series.family != another.series.family for another in others)


def test_what_went_wrong_has_a_point_without_a_time_and_what_was_skipped_everywhere_none() -> None:
    statuses: tuple[Status, ...] = ("wrong", "failed", "hang")
    for status in statuses:
        [found] = points_of(
            run_from_records(
                [*make_repetitions(count=4), failed_record(CASE, 4, status, "3 values differ")]
            )
        )
        assert (found.status, found.seconds, found.reason) == (status, None, "3 values differ")
    assert points_of(run_from_records([failed_record(CASE, 0, "skipped", "no GPU")])) == ()
    [found] = points_of(
        run_from_records(
            [*make_repetitions(count=4), failed_record(CASE, 4, "skipped", "it was wrong before")]
        )
    )
    assert found.seconds is not None, "a later launch without time takes none away"
    assert found.launches == 4


def test_entry_digest_changes_when_a_run_grows(tmp_path: Path) -> None:
    found = make_entry(tmp_path, 1, commit="abc")
    assert (found.run.id, found.about) == ("run-001", About(branch="main", commit="abc"))
    records = tmp_path / "run-001" / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole + b'{"cut": ')
    assert read_entry(tmp_path / "run-001", found.about).digest == found.digest, (
        "a line cut short is no record"
    )
    records.write_bytes(whole[: whole.index(b"\n") + 1])
    assert read_entry(tmp_path / "run-001", found.about).digest != found.digest
