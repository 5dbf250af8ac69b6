"""A metric is one entry: its column, its glossary line, its place in the schema and the README come of it."""

import jsonschema
import msgspec
import pytest

from parbench.bench.results import metrics
from parbench.bench.results.metrics import METRICS, Metric, MetricValue, declared, value, values
from parbench.bench.results.records import encode, json_schema
from parbench.bench.results.stats import within_launch
from parbench.reports.report import Section, Table
from tests.support.paths import ROOT
from tests.support.report_rows import (
    analyze_records,
    column_texts,
    find_analysis_table,
    summarize_row,
)
from tests.support.reports_fixtures import ok_record, step_case, step_metrics, training_metrics

LATE = Metric(
    "late.AXIS",
    "s",
    "lower",
    "late AXIS",
    "how late AXIS is",
    "last - first",
    ("times",),
)


def readme_table() -> str:
    """Return the metrics as Markdown; after a change, put it into bench/README.md."""
    rows = [
        f"| `{one.name}` | {one.unit or '-'} | {one.better or '-'} | {one.help}{formula} |"
        for one in METRICS
        for formula in (f" ({one.formula})" if one.formula else "",)
    ]
    return "\n".join(["| metric | unit | better | what it is |", "|---|---|---|---|", *rows])


def test_one_entry_is_a_column_a_glossary_line_and_a_part_of_the_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, LATE))
    record = ok_record(
        step_case(), metrics=training_metrics() | values({"late.dp": 0.002}, "the slowest rank's")
    )
    assert record.metrics["late.dp"] == MetricValue(
        value=0.002, unit="s", better="lower", method="last - first, the slowest rank's"
    )
    row = summarize_row(record)
    columns = find_analysis_table(analyze_records(record), "step-time").columns
    assert column_texts(columns, row)["late dp"] == "2.00 ms"
    (column,) = (column for column in columns if column.title == "late dp")
    assert column.help == "how late dp is"
    table = Table(id="a", title="a", caption="", columns=columns, rows=(row,))
    section = Section(id="a", title="a", tables=(table, table))
    told = {term.name: term.text for term in section.glossary}
    assert told["late AXIS (late.AXIS)"] == "How late AXIS is (last - first)."
    assert len(told) == len(section.glossary), "each once"
    schema = json_schema()["$defs"]["Record"]["properties"]["metrics"]["patternProperties"]
    assert schema[r"^late\.(.+)$"]["description"] == "how late AXIS is"


def test_the_schema_takes_declared_metrics_and_others_and_refuses_a_bad_one_of_either() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    own = MetricValue(value=1.0, unit="cycles")
    line = msgspec.json.decode(
        encode(ok_record(step_case(), metrics=step_metrics(1.0) | {"mine": own}))
    )
    assert not list(validator.iter_errors(line))
    for name in ("mine", "step_time", "exposed_comm.dp"):
        bad = {**line, "metrics": {**line["metrics"], name: {"value": 1.0, "better": "bigger"}}}
        assert list(validator.iter_errors(bad)), name


def test_every_name_is_declared_once_and_found_by_its_own_entry() -> None:
    names = [one.name for one in METRICS]
    assert len(set(names)) == len(names)
    for one in METRICS:
        assert declared(one.name) is one, one.name
        assert one.help, one.name
        assert one.title, one.name
    dp = declared("exposed_comm.dp")
    assert dp is not None
    assert dp.of("exposed_comm.dp") == Metric(
        "exposed_comm.dp",
        "s",
        "lower",
        "exposed dp",
        dp.help.replace("AXIS", "dp"),
        dp.formula,
        dp.tables,
        kind="from zero",
    )
    assert dp.of("exposed_copy") is None
    assert declared("mine") is None


def test_facts_have_no_direction_and_what_is_not_declared_is_refused() -> None:
    for fact in (
        "compute",
        "makespan",
        "bytes_expected.dp",
        "memory_formula.parameters",
        "bubble_fraction_formula",
    ):
        assert value(fact, 1.0).better is None, fact
    median = within_launch([1.0] * 20, [2] * 10)
    assert value("ect", median, "in turns") == MetricValue(
        value=1.0, unit="s", better="lower", low=1.0, high=1.0, method=f"in turns, {median.method}"
    )
    with pytest.raises(LookupError, match="metric mine is not declared"):
        values({"mine": 1.0})


def test_the_readme_lists_them_as_they_are_declared() -> None:
    assert readme_table() in (ROOT / "bench" / "README.md").read_text(), readme_table()
