"""The tables of pipelines: what each row says, what has no column as nobody knows it, and what a terminal keeps."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pytest
from reports_fixtures import (
    make_plan,
    make_run,
    ok,
    pipeline_details,
    pipeline_record,
    plain,
    pp,
    simulated,
    step_metrics,
)

from bench.records import Record
from reports.columns import Column
from reports.parallel.pipeline import Pipeline, pipelines
from reports.parallel.pipeline_columns import compared_columns, pipeline_columns
from reports.parallel.schedule_comparison import Comparison, comparisons
from reports.summary import summarize

T = TypeVar("T")


def found_in(*records: Record) -> tuple[Pipeline, ...]:
    return pipelines(summarize(make_run(make_plan([record.case for record in records]), records)).rows)


def cells_of(columns: Sequence[Column[T]], row: T) -> dict[str, str]:
    return {column.title: column.text(row) for column in columns}


def functional() -> Record:
    """Return a step of which no bubble is claimed."""
    facts = pipeline_details("gpipe", measured=None, predicted=None, idle=None, activation_bytes_by_rank=None)
    return ok(pp("gpipe"), metrics=step_metrics(0.5), details={"pipeline": facts})


def test_a_pipeline_says_all_it_knows() -> None:
    (one,) = found_in(pipeline_record(ranks=4, microbatches=8))
    assert cells_of(pipeline_columns([one]), one) == {
        "schedule": "1f1b",
        "P": "4",
        "M": "8",
        "v": "1",
        "step time": "20.0 ms [18.0, 22.0]",
        "bubble fraction": "26.3 %",
        "simulated": "23.7 %",
        "formula": "21.0 %",
        "bubble overhead": "35.7 %",
        "fraction of span": "20.0 %",
        "idle": "5.00 ms",
        "idle: schedule": "3.00 ms",
        "idle: imbalance": "1.00 ms",
        "idle: p2p": "600 us",
        "idle: rest": "400 us",
        "outside": "1.00 ms",
        "in flight": "2",
        "activations": "5.00 MiB",
    }


def test_the_causes_add_up_to_the_idle_time() -> None:
    (one,) = found_in(pipeline_record())
    columns = {column.title: column for column in pipeline_columns([one])}
    causes = [float(str(column.sort(one))) for title, column in columns.items() if title.startswith("idle: ")]
    assert len(causes) == 4
    assert sum(causes) == pytest.approx(columns["idle"].sort(one))


def test_what_is_functional_only_has_few_columns_and_dashes_beside_others() -> None:
    (alone,) = found_in(functional())
    assert cells_of(pipeline_columns([alone]), alone) == {
        "schedule": "gpipe",
        "P": "2",
        "M": "4",
        "v": "1",
        "step time": "500 ms [450, 550]",
    }
    both = found_in(pipeline_record(), functional())
    cells = cells_of(pipeline_columns(both), both[1])
    assert set(list(cells.values())[5:]) == {"-"}
    assert len(cells) == 18


def test_a_schedule_without_a_closed_form_has_a_dash_beside_one_that_has_it() -> None:
    unknown = pipeline_record("zb_v")
    unknown = msgspec.structs.replace(unknown, metrics=unknown.metrics | {"bubble_fraction_formula": plain(None, "")})
    both = found_in(unknown, pipeline_record("1f1b"))
    assert [cells_of(pipeline_columns(both), one)["formula"] for one in both] == ["-", "21.0 %"]
    assert "formula" not in cells_of(pipeline_columns(both[:1]), both[0])


def test_half_microbatches_in_flight_are_not_rounded_away() -> None:
    record = pipeline_record()
    record = msgspec.structs.replace(record, metrics=record.metrics | {"in_flight": plain(5.5, "microbatches")})
    (one,) = found_in(record)
    assert cells_of(pipeline_columns([one]), one)["in flight"] == "5.5"


def test_a_negative_rest_is_shown_as_it_is() -> None:
    record = pipeline_record()
    record = msgspec.structs.replace(record, metrics=record.metrics | {"idle_rest": plain(-0.001, "s")})
    (one,) = found_in(record)
    assert cells_of(pipeline_columns([one]), one)["idle: rest"] == "-1.00 ms"


def test_rows_are_named_by_schedule_and_what_has_no_column() -> None:
    found = found_in(pipeline_record("1f1b", split="3+1"), pipeline_record("1f1b"), pipeline_record("zb"))
    assert [pipeline_columns(found)[0].text(one) for one in found] == ["1f1b split=3+1", "1f1b", "zb"]


def test_a_narrow_terminal_keeps_the_bubble_and_loses_detail_before_comparison() -> None:
    found = found_in(pipeline_record())
    columns = pipeline_columns(found)
    kept = [column.title for column in columns if not column.drop]
    assert kept == ["schedule", "P", "M", "v", "step time", "bubble fraction"]
    drops = {column.title: column.drop for column in columns}
    assert drops["simulated"] < drops["formula"] < drops["idle: rest"] < drops["in flight"]


def comparison() -> Comparison:
    others = [
        simulated("zb_v", 0.018, 2),
        simulated("dualpipe_v", chunks=2, why_not="dualpipe_v needs microbatches(4) >= stages(8)"),
    ]
    (found,) = comparisons(found_in(pipeline_record(comparison=others)))
    return found


def test_schedules_say_whether_they_were_measured_or_simulated() -> None:
    entries = comparison().entries
    columns = compared_columns(entries)
    cells = [cells_of(columns, one) for one in entries]
    assert cells[0] == {
        "schedule": "zb_v",
        "v": "2",
        "step time": "18.0 ms",
        "source": "simulated",
        "bubble fraction": "5.00 %",
        "in flight": "4",
        "activations": "3.00 MiB",
        "cannot run": "-",
    }
    assert (cells[1]["schedule"], cells[1]["source"], cells[1]["step time"]) == ("1f1b", "measured", "20.0 ms")


def test_what_cannot_run_says_why_and_has_no_numbers() -> None:
    entries = comparison().entries
    cells = cells_of(compared_columns(entries), entries[-1])
    assert cells.pop("cannot run") == "dualpipe_v needs microbatches(4) >= stages(8)"
    assert list(cells.values()) == ["dualpipe_v", "2", "-", "-", "-", "-", "-"]


def test_reasons_and_unknown_figures_have_no_column_without_need() -> None:
    entries = comparison().entries[:2]
    assert "cannot run" not in cells_of(compared_columns(entries), entries[0])
    bare = [{"schedule": "zb_v", "chunks": 2, "step_seconds": 1.0}]
    (found,) = comparisons(found_in(functional(), pipeline_record("1f1b", microbatches=8)) + _only(bare))
    titles = [column.title for column in compared_columns(found.entries)]
    assert titles == ["schedule", "v", "step time", "source"]


def _only(simulations: list[dict[str, object]]) -> tuple[Pipeline, ...]:
    facts = pipeline_details("naive", measured=None, activation_bytes_by_rank=None, comparison=simulations)
    return found_in(ok(pp("naive"), metrics=step_metrics(0.5), details={"pipeline": facts}))


def test_every_column_is_explained() -> None:
    found = found_in(pipeline_record())
    assert all(column.help for column in pipeline_columns(found))
    assert all(column.help for column in compared_columns(comparison().entries))
