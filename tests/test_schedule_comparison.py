"""Schedules side by side: named by what differs, in order of time, measured before simulated, like beside like."""

import msgspec
import pytest
from reports_fixtures import (
    make_plan,
    make_run,
    ok,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    plain,
    pp,
    simulated,
)

from bench.records import Record
from reports.parallel.pipeline import (
    pipelines,
)
from reports.parallel.schedule_comparison import Comparison, Entry, comparisons, schedule_labels
from reports.summary import Row, Summary, summarize


def summary_of(*records: Record) -> Summary:
    cases = {record.case.id: record.case for record in records}.values()
    return summarize(make_run(make_plan(cases, launches=1 + max(one.launch for one in records)), records))


def rows_of(*records: Record) -> tuple[Row, ...]:
    return summary_of(*records).rows


def labels_of(*records: Record) -> list[str]:
    return list(schedule_labels(pipelines(rows_of(*records))).values())


def test_a_pipeline_is_named_by_its_schedule_and_what_has_no_column() -> None:
    records = [pipeline_record(hidden=64), pipeline_record(hidden=128, microbatches=8), pipeline_record("zb")]
    assert labels_of(*records) == ["1f1b hidden=64", "1f1b hidden=128", "zb"]
    assert labels_of(pipeline_record(), pipeline_record(microbatches=8)) == ["1f1b", "1f1b"]


def test_orders_of_ones_own_are_told_apart_by_their_ids_and_not_by_all_their_actions() -> None:
    cases = [pp("1f1b", order=order) for order in ("0F0,0B0;1F0,1B0", "0F0,,0B0;1F0,1B0")]
    facts = {"pipeline": pipeline_details() | {"schedule": "custom"}}
    mine = [ok(case, metrics=pipeline_metrics(), details=facts) for case in cases]
    assert labels_of(*mine) == [f"custom ({case.id})" for case in cases]
    assert labels_of(mine[0], pipeline_record()) == ["custom", "1f1b"]


def test_labels_hold_nothing_that_a_terminal_obeys() -> None:
    facts = pipeline_details("1f1b") | {"schedule": "\x1b[1mbold"}
    assert labels_of(ok(pp(), metrics=pipeline_metrics(), details={"pipeline": facts})) == ["\\x1b[1mbold"]


def compared(*records: Record) -> tuple[Comparison, ...]:
    return comparisons(pipelines(rows_of(*records)))


def order(comparison: Comparison) -> list[str]:
    return [entry.label for entry in comparison.entries]


def entry(comparison: Comparison, label: str) -> Entry:
    (found,) = [one for one in comparison.entries if one.label == label]
    return found


OTHERS = [simulated("gpipe", 0.030), simulated("1f1b", 0.011), simulated("zb_v", 0.018, 2)]


def test_schedules_stand_by_step_time_and_a_measured_one_replaces_its_simulation() -> None:
    (found,) = compared(pipeline_record(seconds=0.020, comparison=OTHERS))
    assert order(found) == ["zb_v", "1f1b", "gpipe"]
    assert [one.simulated.measured for one in found.entries] == [False, True, False]
    mine = entry(found, "1f1b").simulated
    assert (mine.step_seconds, mine.bubble_fraction, mine.in_flight) == (0.020, 0.263, 2.0)
    assert mine.activation_bytes == 5 << 20
    assert found.title == "Schedules compared: 2 ranks, 4 microbatches"


def test_the_same_schedule_with_other_chunks_is_another() -> None:
    others = [simulated("1f1b", 0.011, chunks=2)]
    (found,) = compared(pipeline_record(seconds=0.020, comparison=others))
    assert [(one.label, one.simulated.chunks) for one in found.entries] == [("1f1b", 2), ("1f1b", 1)]
    (found,) = compared(pipeline_record(seconds=0.020, chunks=2, comparison=[*others, simulated("zb_v", 0.1, 2)]))
    assert [one.simulated.chunks for one in found.entries if one.label == "1f1b"] == [2]


def test_all_measured_schedules_of_a_group_take_their_places_and_the_first_row_simulates() -> None:
    slow = [simulated("zb_v", 9.0, 2)]
    (found,) = compared(
        pipeline_record("1f1b", seconds=0.020, comparison=OTHERS),
        pipeline_record("gpipe", seconds=0.010, comparison=slow),
    )
    assert order(found) == ["gpipe", "zb_v", "1f1b"]
    assert [one.simulated.step_seconds for one in found.entries] == pytest.approx([0.010, 0.018, 0.020])


def test_the_first_row_that_has_simulations_gives_them() -> None:
    (found,) = compared(pipeline_record("1f1b"), pipeline_record("gpipe", comparison=OTHERS))
    assert set(order(found)) == {"1f1b", "gpipe", "zb_v"}


def test_what_cannot_run_stands_last_and_what_has_no_time_before_it() -> None:
    refused = [simulated("dualpipe_v", chunks=2, why_not="dualpipe_v needs microbatches(2) >= stages(4)")]
    unknown = pipeline_record("gpipe")
    unknown = msgspec.structs.replace(unknown, metrics={"step_time": plain(None, "s")})
    nameless = simulated("naive")
    (found,) = compared(pipeline_record(seconds=99.0, comparison=[*refused, nameless, *OTHERS]), unknown)
    assert order(found) == ["zb_v", "1f1b", "gpipe", "naive", "dualpipe_v"]
    assert entry(found, "dualpipe_v").simulated.why_not == "dualpipe_v needs microbatches(2) >= stages(4)"
    assert entry(found, "gpipe").simulated.step_seconds is None


def test_other_microbatches_ranks_or_models_are_other_groups() -> None:
    records = [
        pipeline_record(comparison=OTHERS, hidden=64),
        pipeline_record(comparison=OTHERS, hidden=64, microbatches=8),
        pipeline_record(comparison=OTHERS, hidden=128),
    ]
    assert [one.title for one in compared(*records)] == [
        "Schedules compared: 2 ranks, 4 microbatches, hidden=64",
        "Schedules compared: 2 ranks, 8 microbatches, hidden=64",
        "Schedules compared: 2 ranks, 4 microbatches, hidden=128",
    ]


def test_splits_of_one_model_stand_beside_each_other_by_name() -> None:
    records = [pipeline_record(split=split, seconds=i, comparison=OTHERS) for i, split in ((1, "even"), (2, "3,1"))]
    (found,) = compared(*records)
    assert order(found) == ["zb_v", "gpipe", "1f1b split=even", "1f1b split=3,1"]


def test_an_order_of_ones_own_stands_beside_the_schedules_of_its_model() -> None:
    facts = {"pipeline": pipeline_details() | {"schedule": "custom"}}
    mine = ok(pp(order="0F0,0B0;1F0,1B0"), seconds=0.015, metrics=pipeline_metrics(0.015), details=facts)
    (found,) = compared(mine, pipeline_record(seconds=0.020, comparison=OTHERS))
    assert order(found) == ["custom", "zb_v", "1f1b", "gpipe"]


def test_one_schedule_alone_is_no_comparison() -> None:
    assert compared(pipeline_record()) == ()
    assert comparisons(()) == ()
