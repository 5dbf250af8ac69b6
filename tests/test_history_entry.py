"""A run's points: the fingerprint changes with what makes times incomparable, and with nothing else."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_fixtures import CASE, launches, run_of
from history_fixtures import entry, put
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective

from bench.errors import UserError
from reports.comparing.history_entry import ABOUT, About, Point, points_of, read_entry, shared_params


def with_value(path: str, value: object) -> dict[str, Any]:
    group, _, name = path.partition(".")
    known: dict[str, dict[str, Any]] = {**ENVIRONMENT}  # type: ignore[dict-item]
    return {**known, group: {**known[group], name: value}}


def point(environment: dict[str, Any] | None = None, **more: Any) -> Point:
    [found] = points_of(run_of(launches(**more), environment))
    return found


def test_a_point_is_the_launches_geometric_mean() -> None:
    found = point()
    assert found.seconds == pytest.approx(1e-3, rel=1e-3)
    assert (found.status, found.launches, found.series.case) == ("ok", 5, CASE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("host.name", "node-b"),
        ("host.cpu_model", "Another CPU"),
        ("process.cores", 64),
        ("torch.version", "2.14.0"),
        ("torch.gpu", "H200"),
        ("variables.NCCL_ALGO", "Ring"),
        ("versions.parbench", "9.9"),
    ],
)
def test_what_matters_begins_another_series(path: str, value: object) -> None:
    assert point(with_value(path, value)).series.fingerprint != point().series.fingerprint


@pytest.mark.parametrize(
    ("path", "value"),
    [("host.kernel", "6.99"), ("versions.python", "3.99"), ("host.boot_id", "other"), ("variables.SLURM_JOB_ID", "7")],
)
def test_what_does_not_matter_does_not(path: str, value: object) -> None:
    assert point(with_value(path, value)).series.fingerprint == point().series.fingerprint


def test_what_may_explain_a_step_is_beside_the_point() -> None:
    found = point(with_value("host.kernel", "6.99"))
    assert found.beside["host.kernel"] == "6.99"
    assert "host.kernel" not in found.series.around
    assert found.series.around["host.name"] == "node-a"


def test_the_world_and_the_parameters_are_of_the_fingerprint() -> None:
    larger = msgspec.structs.replace(WORLD, size=8)
    prints = {point().series.fingerprint, point(world=larger).series.fingerprint}
    prints.add(point(case=collective(size_bytes=2048)).series.fingerprint)
    assert len(prints) == 3


def test_a_disturbed_run_is_another_series() -> None:
    assert point(injected="late:1:3ms").series.fingerprint != point().series.fingerprint


def test_the_family_shares_all_but_the_size() -> None:
    one, other = point(), point(case=collective(size_bytes=2048))
    assert one.series.family == other.series.family
    assert one.series.family != point(case=collective("broadcast")).series.family
    assert "size_bytes" not in shared_params(CASE)


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert point().series.fingerprint == point().series.fingerprint
    assert len(point().series.fingerprint) == 20


def test_what_went_wrong_has_a_point_without_a_time() -> None:
    [found] = points_of(run_of([*launches(count=4), bad(CASE, 4, "wrong", "3 values differ")]))
    assert (found.status, found.seconds, found.reason) == ("wrong", None, "3 values differ")


def test_what_was_skipped_everywhere_has_none() -> None:
    assert points_of(run_of([bad(CASE, 0, "skipped", "no GPU")])) == ()


def test_a_later_launch_without_time_takes_none_away() -> None:
    [found] = points_of(run_of([*launches(count=4), bad(CASE, 4, "skipped", "it was wrong before")]))
    assert found.seconds is not None
    assert found.launches == 4


def test_an_entry_holds_the_files_and_knows_growth(tmp_path: Path) -> None:
    found = entry(tmp_path, 1, commit="abc")
    assert found.run.id == "run-001"
    assert found.about == About(branch="main", commit="abc")
    with (tmp_path / "run-001" / "records.jsonl").open("ab") as file:
        file.write(b'{"cut": ')
    assert read_entry(tmp_path / "run-001", found.about).digest == found.digest, "a line cut short is no record"
    (tmp_path / "run-001" / "records.jsonl").write_bytes(found.records_jsonl[: found.records_jsonl.index(b"\n") + 1])
    assert read_entry(tmp_path / "run-001", found.about).digest != found.digest


def test_the_folders_own_word_on_its_branch_counts(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    (path / ABOUT).write_text('{"branch": "topic", "commit": "fff"}')
    assert read_entry(path, About(branch="main")).about == About(branch="topic", commit="fff")
    (path / ABOUT).write_text("[]")
    with pytest.raises(UserError, match=r"history\.json is not what parbench wrote"):
        read_entry(path, About(branch="main"))
