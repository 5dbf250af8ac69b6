"""Pipeline steps: facts read from records, refused contradictions, columns and comparisons."""

from typing import Any

import pytest

from parbench.bench.results.details import Action, Idle, Ran
from parbench.bench.results.records import Record
from parbench.reports.analysis.pipelines import (
    Comparison,
    Pipeline,
    comparisons,
    pipelines,
    read_pipeline,
    schedule_labels,
    without_timelines,
)
from parbench.reports.analysis.summary import common_details, summarize, unreadable
from parbench.reports.render.data import embedded_json, render_json
from parbench.reports.sections.one_run import report_of
from parbench.reports.sections.pipelines import pipeline_columns
from tests.support.report_rows import (
    column_texts,
    replace_metrics,
    run_from_records,
    summarize_row,
    summarize_rows,
)
from tests.support.reports_fixtures import (
    counted_metric,
    failed_record,
    ok_record,
    pipeline_case,
    pipeline_details,
    pipeline_metrics,
    pipeline_record,
    simulated_schedule,
    step_case,
)


def read(*records: Record) -> Pipeline:
    launches = 1 + max(record.launch for record in records)
    pipeline = read_pipeline(summarize_row(*records, launches=launches))
    assert isinstance(pipeline, Pipeline)
    return pipeline


def record_of(schedule: str = "1f1b", **details: Any) -> Record:
    facts = {"pipeline": pipeline_details(schedule) | details}
    return ok_record(
        pipeline_case(schedule), seconds=0.5, metrics=pipeline_metrics(), details=facts
    )


def test_read_pipeline_reads_facts_and_leaves_others_unknown() -> None:
    facts = read(pipeline_record(ranks=4, microbatches=8)).facts
    assert (facts.schedule, facts.ranks, facts.microbatches, facts.chunks) == ("1f1b", 4, 8, 1)
    assert facts.stages_by_rank == ((0,), (1,), (2,), (3,))
    few = {"schedule": "gpipe", "ranks": 2, "microbatches": 4, "chunks": 1}
    bare = read(
        ok_record(
            pipeline_case(), metrics={}, details={"pipeline": few | {"stages_by_rank": [[0], [1]]}}
        )
    )
    assert (bare.facts.measured, bare.facts.idle, bare.facts.clock) == (None,) * 3
    assert bare.activation_bytes is None


def test_activation_bytes_are_measured_or_the_maximum_over_ranks() -> None:
    assert read(record_of()).activation_bytes == 5 << 20
    unmeasured = record_of(activation_bytes_by_rank=[7, 9])
    assert read(replace_metrics(unmeasured, memory__activations=None)).activation_bytes == 9


def test_read_pipeline_reads_actions_and_idle_causes() -> None:
    timeline = [
        [["12F10", 0, 1], ["12I10", 1, 2], ["12W10", 2, 3], ["0B3", 3, 4]],
        [["1F0", 12, 22]],
    ]
    idle = [[1, 0, 12, "p2p"]]
    record = record_of(stages_by_rank=[[0, 12], [1, 11]], chunks=2, measured=timeline, idle=idle)
    facts = read(record).facts
    assert facts.measured is not None
    assert [str(ran.action) for ran in facts.measured[0]] == ["12F10", "12I10", "12W10", "0B3"]
    assert (facts.measured[1], facts.idle) == ((Ran("1F0", 12, 22),), (Idle(1, 0, 12, "p2p"),))
    assert Action.parse("12I10") == Action(12, "I", 10)


def test_pipelines_are_valid_pipeline_steps_only() -> None:
    failed = failed_record(pipeline_case("gpipe"), details={"pipeline": pipeline_details()})
    other = ok_record(step_case(), details={"pipeline": "of another kind"})
    rows = summarize_rows(ok_record(step_case("ddp")), pipeline_record(), failed, other)
    assert [pipeline.row.case.params["schedule"] for pipeline in pipelines(rows)] == ["1f1b"]


def test_pipeline_uses_the_first_repetition_with_a_timeline() -> None:
    without = pipeline_record(launch=0, measured=None)
    assert read(without, *(pipeline_record(launch=i) for i in (1, 2))).launch == 1
    assert read(without).launch == 0


OVERLAP = [[["0F0", 0, 10], ["0F1", 9, 20]], []]


@pytest.mark.parametrize(
    ("details", "value"),
    [
        ({"measured": [[["0X1", 0, 1]], []]}, "'0X1'"),
        ({"measured": [[["-1F0", 0, 1]], []]}, "'-1F0'"),
        ({"predicted": [[["3F0", 0, 1]], []]}, "3F0"),
        ({"measured": OVERLAP}, "0F1"),
        ({"predicted": OVERLAP}, "0F1"),
        ({"stages_by_rank": [[0]]}, "stages_by_rank(1) != 2"),
        ({"measured": [[]] * 3}, "3 of 2 ranks"),
        ({"idle": [[2, 0, 1, "rest"]]}, "{2} of 2"),
        ({"idle": [[0, 0, 1, "lunch"]]}, "'lunch'"),
        ({"microbatches": "four"}, "`str`"),
        ({"measured": [[["0F0", 0]], []]}, "length 3"),
    ],
)
def test_contradictory_facts_are_unreadable(details: dict[str, Any], value: str) -> None:
    rows = summarize_rows(record_of(**details))
    (message,) = unreadable(rows, read_pipeline)
    assert message.startswith("workload.pp schedule=1f1b")
    assert value in message
    assert "\n" not in message
    assert pipelines(rows) == ()


def test_embedded_data_has_no_timelines() -> None:
    run = run_from_records(pipeline_record(), ok_record(step_case()))
    summary = summarize(run)
    thin = without_timelines(summary)
    details = common_details(thin.rows[0])["pipeline"]
    assert details["schedule"] == "1f1b"
    assert not details.keys() & {"measured", "predicted", "idle"}
    assert thin.rows[1] == summary.rows[1]
    report = report_of(run)
    assert ["0F0" in render(report) for render in (render_json, embedded_json)] == [True, False]


def test_pipeline_columns_show_bubble_and_idle_causes() -> None:
    pipeline = read(pipeline_record(ranks=4, microbatches=8))
    columns = pipeline_columns([pipeline])
    cells = column_texts(columns, pipeline)
    names = ("P", "M", "v", "bubble fraction", "simulated", "formula", "in flight", "activations")
    assert [cells[name] for name in names] == [
        *("4", "8", "1", "26.3 %", "23.7 %", "21.0 %", "2", "5.00 MiB")
    ]
    sorts = {column.title: column.sort(pipeline) for column in columns}
    causes = [float(str(value)) for title, value in sorts.items() if title.startswith("idle: ")]
    assert len(causes) == 4
    assert sum(causes) == pytest.approx(sorts["idle"])
    odd = {
        "in_flight": counted_metric(5.5, "microbatches"),
        "idle_rest": counted_metric(-0.001, "s"),
    }
    pipeline = read(replace_metrics(pipeline_record(), **odd))
    cells = column_texts(pipeline_columns([pipeline]), pipeline)
    assert (cells["in flight"], cells["idle: rest"]) == ("5.5", "-1.00 ms")


def labels_of(*records: Record) -> list[str]:
    return list(schedule_labels(pipelines(summarize_rows(*records))).values())


def test_schedule_labels_add_what_differs() -> None:
    records = [pipeline_record(hidden=64), pipeline_record(hidden=128, microbatches=8)]
    assert labels_of(*records, pipeline_record("zb")) == ["1f1b hidden=64", "1f1b hidden=128", "zb"]
    assert labels_of(pipeline_record(), pipeline_record(microbatches=8)) == ["1f1b", "1f1b"]
    assert labels_of(record_of(schedule="\x1b[1mbold")) == ["\\x1b[1mbold"]


def test_schedule_labels_of_custom_orders_are_ids() -> None:
    cases = [
        pipeline_case("1f1b", order=order) for order in ("0F0,0B0;1F0,1B0", "0F0,,0B0;1F0,1B0")
    ]
    facts = {"pipeline": pipeline_details() | {"schedule": "custom"}}
    records = [ok_record(case, metrics=pipeline_metrics(), details=facts) for case in cases]
    assert labels_of(*records) == [f"custom ({case.id})" for case in cases]


OTHERS = [
    simulated_schedule("gpipe", 0.030),
    simulated_schedule("1f1b", 0.011),
    simulated_schedule("zb_v", 0.018, 2),
]


def compared(*records: Record) -> Comparison:
    (comparison,) = comparisons(pipelines(summarize_rows(*records)))
    return comparison


def test_comparison_orders_schedules_by_step_time() -> None:
    comparison = compared(pipeline_record(seconds=0.020, comparison=OTHERS))
    entries = [
        (e.label, e.simulated.measured, e.simulated.step_seconds) for e in comparison.entries
    ]
    assert entries == [("zb_v", False, 0.018), ("1f1b", True, 0.020), ("gpipe", False, 0.030)]
    measured = comparison.entries[1].simulated
    assert (measured.bubble_fraction, measured.activation_bytes) == (0.263, 5 << 20)
    assert comparisons(pipelines(summarize_rows(pipeline_record()))) == ()


def test_comparison_keeps_other_virtual_stages_apart() -> None:
    others = [simulated_schedule("1f1b", 0.011, chunks=2)]
    for chunks, expected in ((1, [2, 1]), (2, [2])):
        rival = simulated_schedule("zb_v", 0.1, 2)
        record = pipeline_record(seconds=0.020, chunks=chunks, comparison=[*others, rival])
        entries = [entry for entry in compared(record).entries if entry.label == "1f1b"]
        assert [entry.simulated.chunks for entry in entries] == expected


def test_comparison_ends_with_unknown_and_impossible_schedules() -> None:
    refused = simulated_schedule("dualpipe_v", chunks=2, why_not="microbatches(4) < stages(8)")
    untimed = replace_metrics(pipeline_record("gpipe"), step_time=counted_metric(None, "s"))
    others = [refused, simulated_schedule("naive"), *OTHERS]
    entries = compared(pipeline_record(seconds=99.0, comparison=others), untimed).entries
    assert [entry.label for entry in entries] == ["zb_v", "1f1b", "gpipe", "naive", "dualpipe_v"]
