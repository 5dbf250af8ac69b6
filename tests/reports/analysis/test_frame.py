"""Records as pandas frames: what records hold and nothing else, a row where nothing was measured, units in names."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import parbench
from parbench import cli
from parbench.bench.plan.plan import Skipped
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import Record
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError
from tests.support.golden import BASE, GOLDEN, NEW, STEPS
from tests.support.nodes_fixtures import sample_sweep
from tests.support.paths import ROOT
from tests.support.report_rows import run_from_records
from tests.support.reports_fixtures import (
    HOSTILE_TEXT,
    WORLD,
    collective_case,
    failed_record,
    hang_record,
    make_plan,
    make_run,
    ok_record,
    sample_run,
    step_case,
    write_run,
)


def written(out: Path, *records: Record, launches: int = 1) -> Path:
    return write_run(out, run_from_records(*records, launches=launches))


def only(frame: pd.DataFrame) -> dict[str, Any]:
    (row,) = rows_of(frame)
    return row


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def samples(
    arrivals_ns: list[list[int]], issue_ns: int = 0, ranks: tuple[int, ...] = (0, 1), steps: int = 1
) -> bytes:
    """Return a file of samples as ranks write it: each takes a millisecond from its arrival."""
    arrivals, out = np.array(arrivals_ns), io.BytesIO()
    took = np.full_like(arrivals, 1_000_000)
    np.savez_compressed(
        out,
        ranks=np.array(ranks),
        arrival_ns=arrivals,
        exit_ns=arrivals + took,
        duration_ns=took,
        issue_ns=np.full_like(took, issue_ns),
        steps_per_sample=np.int64(steps),
    )
    return out.getvalue()


def keep_samples(path: Path, record: Record, content: bytes) -> None:
    (path / "samples" / f"{record.case.id}-{record.launch}.npz").write_bytes(content)


@pytest.mark.parametrize("path", [STEPS, BASE, NEW])
def test_load_has_every_number_of_a_run(path: Path) -> None:
    run = load_run(path)
    rows = iter(rows_of(parbench.load(path)))
    for record in run.records:
        for name, metric in record.metrics.items():
            row = next(rows)
            assert (row["run"], row["case"], row["name"]) == (
                run.info.id,
                record.case.id,
                record.case.name,
            )
            assert (row["launch"], row["status"], row["metric"]) == (record.launch, "ok", name)
            for field in ("value", "low", "high", "unit", "better", "method"):
                found, expected = row[field], getattr(metric, field)
                assert pd.isna(found) if expected is None else found == expected, (name, field)
            params = {
                key.removeprefix("param_"): value
                for key, value in row.items()
                if key.startswith("param_")
            }
            assert {
                key: value for key, value in params.items() if not pd.isna(value)
            } == record.case.whole
            assert (row["world_size"], row["nodes"]) == (record.world.size, record.world.nodes)
            assert (row["backend"], row["device"]) == (record.world.backend, record.world.device)
            assert row["iterations"] == len(record.samples.values)
            assert record.noise is not None
            assert row["noise"] == record.noise.grade
            assert row["record_started"] == pd.Timestamp(record.started)
            assert row["started"] == pd.Timestamp(run.info.started)
    assert next(rows, None) is None


def test_load_has_rows_for_unmeasured_cases(tmp_path: Path) -> None:
    cases = [collective_case(size_bytes=1 << i) for i in range(10, 16)]
    measured, failed, hung, wrong, skipped, missing = cases
    lies = {"time": MetricValue(value=1.0, unit="s", better="lower")}
    records = [
        ok_record(measured, notes=["one", "two"]),
        failed_record(failed, reason=HOSTILE_TEXT),
        hang_record(hung),
    ]
    records.append(failed_record(wrong, status="wrong", reason="3 differ", metrics=lies))
    records.append(failed_record(skipped, status="skipped", reason="left out"))
    unplanned = Skipped(case=collective_case(size_bytes=7), reason="7 B is not a multiple of 4 B")
    path = write_run(tmp_path, make_run(make_plan(cases, launches=1, skipped=[unplanned]), records))
    frame = parbench.load(path)
    nothing, fine = frame[frame["metric"].isna()], frame[frame["metric"].notna()]
    assert {row["case"]: (row["status"], row["reason"]) for row in rows_of(nothing)} == {
        failed.id: ("failed", HOSTILE_TEXT),
        hung.id: ("hang", "rank 1 did not arrive within 60 s"),
        wrong.id: ("wrong", "3 differ"),
        skipped.id: ("skipped", "left out"),
        unplanned.case.id: ("skipped", unplanned.reason),
        missing.id: ("missing", "no record"),
    }
    assert len(nothing) == 6
    assert (
        nothing[["value", "low", "high", "unit", "better", "method", "iterations", "noise"]]
        .isna()
        .all(axis=None)
    )
    assert (
        frame[frame["status"] == "missing"][["world_size", "backend", "record_started"]]
        .isna()
        .all(axis=None)
    )
    assert set(fine["status"]) == {"ok"}
    assert set(fine["notes"]) == {"one; two"}


def test_load_uses_the_last_record_of_a_repetition(tmp_path: Path) -> None:
    unknown = {"time": MetricValue(value=None, unit="s", better="lower", method="no clock")}
    row = only(
        parbench.load(
            written(
                tmp_path,
                failed_record(collective_case()),
                ok_record(collective_case(), metrics=unknown),
            )
        )
    )
    assert (row["status"], row["metric"], row["unit"], row["method"]) == (
        "ok",
        "time",
        "s",
        "no clock",
    )
    assert pd.isna(row["value"])
    row = only(parbench.load(written(tmp_path, ok_record(collective_case(), metrics={}))))
    assert row["status"] == "ok"
    assert pd.isna(row["metric"])


def test_load_prefixes_and_types_parameters(tmp_path: Path) -> None:
    mine = {"method": "ring", "value": 3, "launch": 7, "shape": "tiny", "ratio": 0.5, "flag": True}
    frame = parbench.load(
        written(
            tmp_path,
            ok_record(step_case("mine", **mine, mixed=1)),
            ok_record(step_case("other", ratio=2, mixed="two")),
        )
    )
    assert not frame.columns.duplicated().any()
    first, *_, other = rows_of(frame)
    assert {name: first[f"param_{name}"] for name in mine} == mine
    assert (first["launch"], first["param_mixed"], other["param_mixed"]) == (0, 1, "two")
    assert all(pd.isna(other[f"param_{name}"]) for name in ("value", "flag", "method"))
    kinds = {
        name: str(frame[f"param_{name}"].dtype)
        for name in ("value", "ratio", "flag", "method", "mixed")
    }
    assert kinds == {
        "value": "Int64",
        "ratio": "float64",
        "flag": "boolean",
        "method": "string",
        "mixed": "object",
    }


def test_load_joins_runs_and_folders() -> None:
    both = parbench.load(BASE, str(NEW))
    assert list(both["run"].unique()) == [load_run(path).info.id for path in (BASE, NEW)]
    assert len(both) == len(parbench.load(BASE)) + len(parbench.load(NEW))
    everything = parbench.load(GOLDEN / "runs")
    assert set(everything["run"]) == {
        load_run(path).info.id for path in (GOLDEN / "runs").iterdir()
    }
    assert len(parbench.load(GOLDEN / "runs", BASE)) == len(everything), (
        "a run named twice counts once"
    )


def test_load_warns_of_missing_sweep_points(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Not run") as told:
        frame = parbench.load(sample_sweep(tmp_path / "sweep"))
    assert [(str(one.message), one.filename) for one in told] == [
        ("Not run: 8 nodes x 1, block.", __file__)
    ]
    assert set(frame["nodes"]) == {1, 2, 4}
    assert frame["point"].notna().all()
    assert frame[frame["point"] == "4 nodes x 1, block"]["status"].tolist() == ["hang"]
    assert parbench.load(BASE)["point"].isna().all()


def test_load_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path} is no run: it holds no readable run.json"):
        parbench.load(tmp_path)
    with pytest.raises(UserError, match="no run was named"):
        parbench.load()
    path = written(tmp_path, ok_record(collective_case()))
    (path / "records.jsonl").write_text("{}\n")
    for load in (parbench.load, parbench.load_samples):
        for place in (path, tmp_path):
            with pytest.raises(UserError, match=r"records.jsonl, line 1 is no record"):
                load(place)


@pytest.mark.parametrize("path", [STEPS, BASE])
def test_load_samples_has_a_row_per_sample(path: Path) -> None:
    run, frame = load_run(path), parbench.load_samples(path)
    assert list(frame["seconds"]) == [
        value for record in run.records for value in record.samples.values
    ]
    assert list(frame["iteration"]) == [
        i for record in run.records for i in range(len(record.samples.values))
    ]
    medians = frame.groupby(["case", "launch"])["seconds"].median().to_dict()
    for record in run.records:
        if record.case.name == "collective.all_reduce":
            assert medians[record.case.id, record.launch] == pytest.approx(
                record.metrics["time"].value
            )


def test_load_samples_by_rank_is_in_seconds(tmp_path: Path) -> None:
    records = [
        ok_record(collective_case()),
        ok_record(collective_case("broadcast")),
        ok_record(collective_case("all_gather")),
        failed_record(step_case()),
    ]
    path = written(tmp_path, *records)
    keep_samples(path, records[0], samples([[0, 5_000_000], [2_000, 5_000_000]], ranks=(2, 6)))
    keep_samples(path, records[1], samples([[0], [0]], issue_ns=500_000, steps=10))
    keep_samples(path, records[3], samples([[0], [0]]))
    frame = parbench.load_samples(path, by_rank=True)
    assert list(frame["name"]) == ["collective.all_reduce"] * 4 + ["collective.broadcast"] * 2, (
        "all_gather wrote none"
    )
    first, rest = frame[:4], frame[4:]
    assert list(zip(first["rank"], first["iteration"], strict=True)) == [
        (2, 0),
        (2, 1),
        (6, 0),
        (6, 1),
    ]
    assert list(first["arrival_seconds"]) == pytest.approx([0, 5e-3, 2e-6, 5e-3])
    assert list(first["exit_seconds"]) == pytest.approx([1e-3, 6e-3, 1.002e-3, 6e-3])
    assert list(first["duration_seconds"]) == pytest.approx([1e-3] * 4)
    assert first["issue_seconds"].isna().all(), "issuing and waiting were not apart"
    assert list(rest["issue_seconds"]) == pytest.approx([5e-4] * 2)
    assert list(frame["steps_per_sample"]) == [1] * 4 + [10] * 2
    assert set(frame["world_size"]) == {WORLD.size}


def test_load_samples_refuses_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"no samples of ranks \(\*.npz\) are in {STEPS / 'samples'}"
    ):
        parbench.load_samples(STEPS, by_rank=True)
    record, partial = ok_record(collective_case()), io.BytesIO()
    path = written(tmp_path, record)
    np.savez(partial, ranks=np.array([0]), duration_ns=np.array([[1]]))
    for content in (b"junk", partial.getvalue(), samples([[1, 2]])):
        keep_samples(path, record, content)
        with pytest.raises(
            UserError, match=rf"{record.case.id}-0.npz holds no samples that can be read: "
        ):
            parbench.load_samples(path, by_rank=True)


def test_csv_export_equals_the_frame(tmp_path: Path) -> None:
    for path in (STEPS, BASE, write_run(tmp_path, sample_run())):
        done = CliRunner().invoke(cli.main, ["export", str(path), "--format", "csv"])
        assert (done.exit_code, done.stderr) == (0, "")
        frame = parbench.load(path)
        kinds = {str(name): str(kind) for name, kind in frame.dtypes.items()}
        read = pd.read_csv(
            io.StringIO(done.stdout),
            dtype={name: kind for name, kind in kinds.items() if not kind.startswith("datetime")},
            parse_dates=[name for name, kind in kinds.items() if kind.startswith("datetime")],
        ).astype(kinds)
        frame["unit"] = frame["unit"].mask(frame["unit"] == "")  # CSV knows one kind of nothing
        pd.testing.assert_frame_equal(read, frame, check_exact=True)


def test_readme_example_and_columns_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "reports" / "README.md").read_text()
    [code] = re.findall(r"^```python\n(import parbench\n.*?)^```", readme, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(GOLDEN)
    exec(code, {})
    printed = capsys.readouterr().out
    rate = load_run(STEPS).records[0].metrics["busbw"].value
    assert rate is not None
    assert f"{rate / 1e9:.6f}" in printed
    told, _, _ = readme.partition(code)[2].partition("\n## ")
    columns = {*parbench.load(STEPS), *parbench.load_samples(STEPS)}
    ranks = {
        "rank",
        "arrival_seconds",
        "exit_seconds",
        "duration_seconds",
        "issue_seconds",
        "steps_per_sample",
    }
    named = {
        word
        for cell in re.findall(r"^\| (`.*?) \|", told, re.MULTILINE)
        for word in re.findall(r"`(\w+)`", cell)
    }
    assert named >= {"value", "seconds", "record_seconds"}
    assert named <= columns | ranks | {"param_NAME"}
