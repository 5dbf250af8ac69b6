"""Records: what is written reads back the same, fits its schema, and is never half of anything."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases import make_case
from bench.errors import UserError
from bench.records import (
    SCHEMA,
    Check,
    Metric,
    Noise,
    RankState,
    Record,
    Samples,
    Status,
    Stop,
    WorldInfo,
    encode,
    json_schema,
    read_records,
)

SMALL = Record(
    case=make_case("collective.all_reduce", "bench.collectives:all_reduce", {"size_bytes": 1024}),
    world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
    launch=0,
    status="skipped",
    started="2026-01-02T03:04:05.678Z",
    seconds=0.0,
)
FULL = msgspec.structs.replace(
    SMALL,
    status="ok",
    reason="größer",
    stop="precision",
    check=Check(passed=True, wrong=0),
    samples=Samples(values=[1e-3, 2e-3, 0.1 + 0.2]),
    metrics={"time": Metric(value=1e-3, unit="s", better="lower", low=9e-4, high=None, method="median")},
    noise=Noise(grade="quiet", spread=0.01, steady="flat"),
    details={"bytes": 1024, "nested": {"list": [1, None, "x"]}},
    notes=["functional only"],
    environment={"threads": 1},
    ranks=[RankState(rank=1, host="h", pid=7, state="waiting", stack='File "x.py", line 1')],
)


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def changed(**fields: object) -> bytes:
    """Return FULL as a line in which fields are other JSON, whatever it means."""
    return json.dumps({**json.loads(encode(FULL)), **fields}).encode() + b"\n"


@pytest.mark.parametrize("record", [SMALL, FULL], ids=["small", "full"])
def test_a_record_is_one_line_that_reads_back_the_same(record: Record, file: Path) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert list(read_records(write(file, line, line))) == [record, record]


@settings(deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=50),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
def test_samples_read_back_to_the_last_bit_and_text_to_the_last_letter(values: list[float], text: str) -> None:
    record = msgspec.structs.replace(SMALL, samples=Samples(values=values), reason=text)
    line = encode(record)
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line, type=Record) == record


def test_a_record_says_its_schema_and_its_case_in_full() -> None:
    raw = json.loads(encode(SMALL))
    assert raw["schema"] == SCHEMA == 1  # a new number needs its line in the history of the format
    assert raw["case"]["id"] == SMALL.case.id
    assert raw["case"]["params"] == {"size_bytes": 1024}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_written_as_unknown_where_unknown_is_allowed(number: float, file: Path) -> None:
    metric = Metric(value=number, unit="s", better="lower", low=number, high=number)
    record = msgspec.structs.replace(
        SMALL, metrics={"time": metric}, details={"x": number}, environment={"y": [number]}
    )
    line = encode(record)
    assert b"NaN" not in line
    assert b"nfinity" not in line
    (read,) = read_records(write(file, line))
    assert read.metrics["time"] == Metric(value=None, unit="s", better="lower")
    assert (read.details, read.environment) == ({"x": None}, {"y": [None]})


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"samples": Samples(values=[1.0, math.nan])}, "$.samples.values[1]"),
        ({"seconds": math.inf}, "$.seconds"),
        ({"noise": Noise(grade="wild", spread=math.nan, steady="flat")}, "$.noise.spread"),
        ({"case": make_case("n", "t:f", {"x": math.nan})}, "$.case.params[...]"),
    ],
    ids=["sample", "seconds", "spread", "parameter"],
)
def test_a_number_that_is_none_is_refused_where_it_would_make_the_file_unreadable(
    fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match="could not be read back") as caught:
        encode(msgspec.structs.replace(SMALL, **fields))
    assert place in str(caught.value)


def test_the_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def errors(raw: object) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(raw)]


@pytest.mark.parametrize("record", [SMALL, FULL], ids=["small", "full"])
def test_what_is_written_fits_the_schema(record: Record) -> None:
    assert errors(json.loads(encode(record))) == []


@pytest.mark.parametrize("status", get_args(Status))
@pytest.mark.parametrize("stop", [None, *get_args(Stop)])
def test_every_status_and_every_stop_fits_the_schema(status: Status, stop: Stop | None) -> None:
    assert errors(json.loads(encode(msgspec.structs.replace(FULL, status=status, stop=stop)))) == []


BAD_FIELDS: list[dict[str, object]] = [
    {"schema": 0},
    {"schema": "1"},
    {"status": "fine"},
    {"stop": "tired"},
    {"samples": {"unit": "s", "values": [1, None]}},
    {"samples": {"unit": "s", "values": [1, "2"]}},
    {"metrics": {"time": {"value": 1, "unit": "s", "better": "bigger"}}},
    {"noise": {"grade": "loud", "spread": 0.1, "steady": "flat"}},
    {"ranks": [{"rank": 0}]},
    {"case": None},
    {"seconds": None},
    {"launch": 0.5},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: next(iter(fields)))
def test_what_the_schema_refuses_the_reader_refuses_and_names_the_line(fields: dict[str, object], file: Path) -> None:
    line = changed(**fields)
    assert errors(json.loads(line)) != []
    with pytest.raises(UserError, match=rf"records\.jsonl, line 2 is no record: .*\$\.{next(iter(fields))}"):
        list(read_records(write(file, encode(SMALL), line)))


@pytest.mark.parametrize("field", ["case", "world", "launch", "status", "started", "seconds"])
def test_a_record_without_a_required_field_is_refused(field: str, file: Path) -> None:
    raw = {name: value for name, value in json.loads(encode(FULL)).items() if name != field}
    assert errors(raw) != []
    with pytest.raises(UserError, match=f"missing required field `{field}`"):
        list(read_records(write(file, json.dumps(raw).encode() + b"\n")))


def test_a_field_of_a_later_parbench_of_the_same_schema_is_passed_over(file: Path) -> None:
    assert list(read_records(write(file, changed(later={"x": 1})))) == [FULL]


@pytest.mark.parametrize("status", ["ok", "something new"])
def test_a_newer_schema_is_refused_as_newer_even_if_its_fields_differ(status: str, file: Path) -> None:
    expected = rf"line 1: schema {SCHEMA + 1} is newer than {SCHEMA}, the newest this parbench reads"
    with pytest.raises(UserError, match=expected):
        list(read_records(write(file, changed(schema=SCHEMA + 1, status=status))))


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[]\n", b"null\n", b"{\n", b"\xff\xfe\n", b'{"schema": 1, "x": "\xff"}\n']
)
def test_a_whole_line_that_is_no_record_is_refused_even_at_the_end(line: bytes, file: Path) -> None:
    with pytest.raises(UserError, match=r"records\.jsonl, line 2 is no record"):
        list(read_records(write(file, encode(SMALL), line)))


def test_text_that_is_not_utf8_inside_a_record_is_refused(file: Path) -> None:
    line = encode(FULL).replace("größer".encode(), "größer".encode("latin-1"))
    with pytest.raises(UserError, match="line 1 is no record"):
        list(read_records(write(file, line)))


def test_a_last_line_cut_short_at_any_byte_is_passed_over_and_the_rest_is_kept(file: Path) -> None:
    whole, last = encode(FULL) + encode(SMALL), encode(FULL)
    for length in range(len(last)):
        assert list(read_records(write(file, whole, last[:length]))) == [FULL, SMALL], length
    assert list(read_records(write(file, whole, last))) == [FULL, SMALL, FULL]


def test_a_line_cut_short_in_the_middle_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="line 1 is no record"):
        list(read_records(write(file, encode(FULL)[:40], encode(FULL))))


def test_an_empty_file_has_no_records(file: Path) -> None:
    assert list(read_records(write(file))) == []


def test_a_file_that_is_absent_or_a_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"records\.jsonl cannot be read: No such file or directory"):
        list(read_records(tmp_path / "records.jsonl"))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        list(read_records(tmp_path))
