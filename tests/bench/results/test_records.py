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

from parbench.bench.plan.cases import make_case
from parbench.bench.results.metrics import MetricValue
from parbench.bench.results.records import (
    SCHEMA,
    Check,
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
from tests.support.refusals import usage_error

SMALL = Record(
    case=make_case(
        "collective.all_reduce",
        "parbench.bench.operations.collectives:all_reduce",
        {"size_bytes": 1024},
    ),
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
    metrics={
        "time": MetricValue(
            value=1e-3, unit="s", better="lower", low=9e-4, high=None, method="median"
        )
    },
    noise=Noise(grade="stable", spread=0.01, steady="flat"),
    details={"bytes": 1024, "nested": {"list": [1, None, "x"]}},
    notes=["functional only"],
    environment={"threads": 1},
    ranks=[RankState(rank=1, host="h", pid=7, state="waiting", stack='File "x.py", line 1')],
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def read(file: Path, *lines: bytes) -> list[Record]:
    """Write these lines and read them as records."""
    file.write_bytes(b"".join(lines))
    return list(read_records(file))


def changed(**fields: object) -> bytes:
    """Return FULL as a line in which fields are other JSON, whatever it means."""
    return json.dumps({**json.loads(encode(FULL)), **fields}).encode() + b"\n"


def errors(line: bytes) -> list[str]:
    return [
        error.json_path
        for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(json.loads(line))
    ]


def test_a_record_is_one_line_that_fits_the_schema_and_reads_back_the_same(file: Path) -> None:
    for record in (SMALL, FULL):
        line = encode(record)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert errors(line) == []
        assert read(file, line, line) == [record, record]
    raw = json.loads(encode(SMALL))
    assert raw["schema"] == SCHEMA
    assert raw["case"]["id"] == SMALL.case.id
    assert raw["case"]["params"] == {"size_bytes": 1024}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0, 1e30), max_size=50),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
def test_samples_read_back_to_the_last_bit_and_text_to_the_last_letter(
    values: list[float], text: str
) -> None:
    record = msgspec.structs.replace(SMALL, samples=Samples(values=values), reason=text)
    line = encode(record)
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line, type=Record) == record


def test_a_number_that_is_none_is_written_as_unknown_where_unknown_is_allowed(file: Path) -> None:
    for number in (math.nan, math.inf, -math.inf):
        metric = MetricValue(value=number, unit="s", better="lower", low=number, high=number)
        record = msgspec.structs.replace(
            SMALL, metrics={"time": metric}, details={"x": number}, environment={"y": [number]}
        )
        line = encode(record)
        assert b"NaN" not in line
        assert b"nfinity" not in line
        (found,) = read(file, line)
        assert found.metrics["time"] == MetricValue(value=None, unit="s", better="lower")
        assert (found.details, found.environment) == ({"x": None}, {"y": [None]})


def test_a_number_that_is_none_is_refused_where_it_would_make_the_file_unreadable() -> None:
    unreadable: list[tuple[str, dict[str, Any]]] = [
        ("$.samples.values[1]", {"samples": Samples(values=[1.0, math.nan])}),
        ("$.seconds", {"seconds": math.inf}),
        ("$.noise.spread", {"noise": Noise(grade="very noisy", spread=math.nan, steady="flat")}),
        ("$.case.params[...]", {"case": make_case("n", "t:f", {"x": math.nan})}),
    ]
    for place, fields in unreadable:
        with pytest.raises(ValueError, match="could not be read back") as caught:
            encode(msgspec.structs.replace(SMALL, **fields))
        assert place in str(caught.value)


def test_the_schema_is_itself_valid_and_takes_every_status_and_every_stop() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for status in get_args(Status):
        for stop in (None, *get_args(Stop)):
            assert errors(encode(msgspec.structs.replace(FULL, status=status, stop=stop))) == [], (
                status,
                stop,
            )


BAD_FIELDS: list[dict[str, object]] = [
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


def test_what_the_schema_refuses_the_reader_refuses_and_names_the_line(file: Path) -> None:
    for fields in BAD_FIELDS:
        line = changed(**fields)
        assert errors(line) != [], fields
        told = usage_error(read, file, encode(SMALL), line)
        assert told.startswith(f"{file}, line 2 is no record: "), fields
        assert f"$.{next(iter(fields))}" in told, fields
    for field in ("case", "world", "launch", "status", "started", "seconds"):
        raw = {name: value for name, value in json.loads(encode(FULL)).items() if name != field}
        line = json.dumps(raw).encode() + b"\n"
        assert errors(line) != [], field
        assert f"missing required field `{field}`" in usage_error(read, file, line)


def test_a_field_of_a_later_parbench_is_passed_over_and_a_newer_schema_refused_as_newer(
    file: Path,
) -> None:
    assert read(file, changed(later={"x": 1})) == [FULL]
    expected = f"line 1: schema {SCHEMA + 1} is newer than {SCHEMA}"
    for status in ("ok", "something new"):
        assert usage_error(read, file, changed(schema=SCHEMA + 1, status=status)).find(expected) > 0


def test_a_whole_line_that_is_no_record_is_refused_even_at_the_end(file: Path) -> None:
    no_utf8 = encode(FULL).replace("größer".encode(), "größer".encode("latin-1"))
    no_records = [
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"{\n",
        b"\xff\xfe\n",
        b'{"schema": 2, "x": "\xff"}\n',
        no_utf8,
    ]
    for line in no_records:
        assert usage_error(read, file, encode(SMALL), line).startswith(
            f"{file}, line 2 is no record"
        ), line
    assert "line 1 is no record" in usage_error(read, file, encode(FULL)[:40], encode(FULL)), (
        "cut short in the middle"
    )


def test_a_last_line_cut_short_at_any_byte_is_passed_over_and_the_rest_is_kept(file: Path) -> None:
    whole, last = encode(FULL) + encode(SMALL), encode(FULL)
    for length in range(len(last)):
        assert read(file, whole, last[:length]) == [FULL, SMALL], length
    assert read(file, whole, last) == [FULL, SMALL, FULL]
    assert read(file) == []
