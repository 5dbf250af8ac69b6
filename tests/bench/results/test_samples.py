"""Files of rank samples: arrays that agree are read, whatever else is refused with its reason."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import Record, WorldInfo
from parbench.bench.results.runs import Run, RunInfo
from parbench.bench.results.samples import load_rank_samples, samples_name
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import collective_case, ok_record


@pytest.fixture
def record() -> Record:
    return ok_record(collective_case())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    plan = Plan(
        preset="node",
        cases=(),
        skipped=(),
        nproc=4,
        backend="gloo",
        device="cpu",
        launches=1,
        budget_seconds=1,
        timeout_seconds=1,
    )
    (tmp_path / "samples").mkdir()
    info = RunInfo(id="run", started="2026-01-02T03:04:05Z", host="host", parbench="0", plan=plan)
    return Run(path=tmp_path, info=info, records=())


def npz(arrays: dict[str, Any]) -> bytes:
    """Return the content of an npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def samples(ranks: int = 2, columns: int = 6) -> dict[str, Any]:
    """Return the arrays of a record as ranks write them."""
    start = 1_000_000 * np.arange(ranks * columns, dtype=np.int64).reshape(ranks, columns)
    stamps = {
        "arrival_ns": start,
        "exit_ns": start + 900,
        "duration_ns": start * 0 + 900,
        "issue_ns": start * 0,
    }
    return {"ranks": np.arange(ranks, dtype=np.int64), **stamps, "steps_per_sample": np.int64(1)}


def test_load_rank_samples_returns_the_known_arrays(run: Run, record: Record) -> None:
    assert load_rank_samples(run, record) == {}, "no file"
    file, right = run.path / samples_name(record), samples(ranks=4, columns=5)
    file.write_bytes(npz({**right, "clock_offsets_ns": np.zeros(4), "more": np.zeros(1)}))
    arrays = load_rank_samples(run, record)
    assert arrays.keys() == right.keys()
    assert all(np.array_equal(arrays[name], right[name]) for name in right)


def test_load_rank_samples_refuses_arrays_that_disagree(run: Run, record: Record) -> None:
    file, right = run.path / samples_name(record), samples(ranks=4, columns=5)
    stamps = right["arrival_ns"]
    wrong: dict[str, dict[str, Any]] = {
        "arrival_ns is an array of float64": {"arrival_ns": stamps.astype(float)},
        "stamps are of shape": {"exit_ns": stamps[:, 1:]},
        "of shape (20,)": {name: stamps.ravel() for name in right if "_ns" in name},
        "of shape (4, 0)": {name: stamps[:, :0] for name in right if "_ns" in name},
        "not a list of at most 4": {"ranks": np.arange(5)},
        "steps_per_sample is not a count": {"steps_per_sample": np.int64(0)},
    }
    for reason, change in wrong.items():
        file.write_bytes(npz({**right, **change}))
        message = usage_error(load_rank_samples, run, record)
        assert message.startswith(f"{file} holds no samples that can be read: ")
        assert reason in message


def test_load_rank_samples_refuses_damaged_files(
    run: Run, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole = run.path / samples_name(record), npz(samples(ranks=4))
    one_array, pickled = io.BytesIO(), np.array([{}], dtype=object)
    np.save(one_array, np.arange(4))
    damaged = {
        "an array alone": one_array.getvalue(),
        "text": b"text",
        "nothing": b"",
        "cut short": whole[:-9],
        "spoilt": whole[:90] + b"\xff" * 40 + whole[130:],
        "a pickle": npz({"ranks": pickled}),
    }
    for what, content in damaged.items():
        file.write_bytes(content)
        assert usage_error(load_rank_samples, run, record).startswith(
            f"{file} holds no samples that can be read: "
        ), what
    monkeypatch.setattr("parbench.bench.results.samples.MAX_BYTES", 100)
    file.write_bytes(whole)
    assert usage_error(load_rank_samples, run, record).endswith("it holds more than 100 bytes")


def test_samples_name_stays_in_the_folder(run: Run) -> None:
    world = WorldInfo(size=1, nodes=1, backend="gloo", device="cpu")
    case = collective_case()
    odd = ok_record(
        type(case)(id="../../evil", name=case.name, target=case.target, params=case.params),
        world=world,
    )
    assert (run.path / samples_name(odd)).parent == run.path / "samples"
