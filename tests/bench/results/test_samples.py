"""Files of rank samples: arrays that agree are read, damaged files are refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from parbench.bench.results.runs import Run, load_rank_samples, make_samples_path
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import (
    collective_case,
    make_plan,
    make_run,
    ok_record,
)

RECORD = ok_record(collective_case())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "samples").mkdir()
    return replace(make_run(make_plan([]), []), path=tmp_path)


ARRAYS: dict[str, Any] = {
    "ranks": np.arange(4, dtype=np.int64),
    "arrival_ns": np.arange(20, dtype=np.int64).reshape(4, 5),
    "duration_ns": np.full((4, 5), 900),
    "steps_per_sample": np.int64(1),
}


def pack(arrays: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


CONTENT = pack(ARRAYS)


def test_arrays_are_read(run: Run) -> None:
    (run.path / make_samples_path(RECORD)).write_bytes(CONTENT)
    arrays = load_rank_samples(run, RECORD)
    assert arrays.keys() == ARRAYS.keys()
    for name in ARRAYS:
        assert np.array_equal(arrays[name], ARRAYS[name])


@pytest.mark.parametrize(
    "content", [b"", CONTENT[:-9], pack({"ranks": np.array([{}], dtype=object)})]
)
def test_damaged_file_is_refused(run: Run, content: bytes) -> None:
    file = run.path / make_samples_path(RECORD)
    file.write_bytes(content)
    assert str(file) in usage_error(load_rank_samples, run, RECORD)
