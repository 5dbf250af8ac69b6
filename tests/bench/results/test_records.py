"""Records: they read back as written, and are never partial."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from parbench.bench.plan.cases import make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import (
    SCHEMA,
    RankState,
    Record,
    Samples,
    WorldInfo,
    encode_record,
    read_records,
)
from tests.support.refusals import usage_error

SMALL = Record(
    case=make_case("collective.all_reduce", "module:all_reduce", {"size_bytes": 1024}),
    world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
    repetition=0,
    status="skipped",
    started="2026-01-02T03:04:05.678Z",
    seconds=0.0,
)
FULL = msgspec.structs.replace(
    SMALL,
    status="ok",
    reason="größer",
    stop="precision",
    samples=Samples(values=[1e-3, 2e-3, 0.1 + 0.2]),
    metrics={
        "time": MetricValue(value=1e-3, unit="s", better="lower", low=9e-4, method="median")
    },
    details={"bytes": 1024, "nested": {"list": [1, None, "x"]}},
    ranks=[RankState(rank=1, host="h", pid=7, state="waiting", stack='File "x.py", line 1')],
)
SMALL_LINE = encode_record(SMALL)
FULL_LINE = encode_record(FULL)


def read_lines(folder: Path, *lines: bytes) -> list[Record]:
    file = folder / "records.jsonl"
    file.write_bytes(b"".join(lines))
    return list(read_records(file))


def change_fields(**fields: object) -> bytes:
    """Return the line of FULL with other JSON in some fields."""
    return json.dumps({**json.loads(FULL_LINE), **fields}).encode() + b"\n"


@pytest.mark.parametrize("record", [SMALL, FULL])
def test_record_reads_back_from_one_line(tmp_path: Path, record: Record) -> None:
    line = encode_record(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert read_lines(tmp_path, line, line) == [record, record]


def test_non_finite_metric_is_unknown(tmp_path: Path) -> None:
    metric = MetricValue(value=math.nan, unit="s", high=math.inf)
    record = msgspec.structs.replace(SMALL, metrics={"time": metric}, details={"x": [math.inf]})
    [read_record] = read_lines(tmp_path, encode_record(record))
    assert read_record.metrics["time"] == MetricValue(value=None, unit="s")
    assert read_record.details == {"x": [None]}


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": "1"},
        {"samples": {"unit": "s", "values": [1, None]}},
        {"case": None},
    ],
)
def test_bad_field_is_refused_with_its_line(tmp_path: Path, fields: dict[str, object]) -> None:
    line = change_fields(**fields)
    message = usage_error(read_lines, tmp_path, SMALL_LINE, line)
    assert "records.jsonl, line 2" in message
    [name] = fields
    assert f"$.{name}" in message


def test_other_schema_is_refused(tmp_path: Path) -> None:
    line = change_fields(schema=SCHEMA + 1, status="something new")
    message = usage_error(read_lines, tmp_path, line)
    assert f"schema version {SCHEMA + 1}, and this parbench reads {SCHEMA}" in message


@pytest.mark.parametrize("length", [0, 1, len(FULL_LINE) - 1])
def test_last_line_cut_short_is_ignored(tmp_path: Path, length: int) -> None:
    assert read_lines(tmp_path, FULL_LINE, SMALL_LINE, FULL_LINE[:length]) == [FULL, SMALL]
