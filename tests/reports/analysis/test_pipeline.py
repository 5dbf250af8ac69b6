"""Pipelines: what records tell of them, refused where they contradict themselves; their tables; schedules compared."""

from typing import Any

import msgspec
import pytest
from report_rows import cells_of, row_of, rows_of, run_of, with_metrics
from report_rows import told as line_of
from reports_fixtures import bad, ok, pipeline_details, pipeline_metrics, pipeline_record, plain, pp, simulated, step

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


def found_in(*records: Record) -> tuple[Pipeline, ...]:
    return pipelines(rows_of(*records))


def read(*records: Record) -> Pipeline:
    found = read_pipeline(row_of(*records, launches=1 + max(one.launch for one in records)))
    assert isinstance(found, Pipeline)
    return found


def record_of(schedule: str = "1f1b", *, metrics: bool = True, **details: Any) -> Record:
    """Return a step whose facts are these, the rest the usual ones; without metrics no bubble is claimed of it."""
    facts = {"pipeline": pipeline_details(schedule) | details}
    return ok(pp(schedule), seconds=0.5, metrics=pipeline_metrics() if metrics else None, details=facts)


def test_facts_are_read_as_they_were_written_and_what_is_absent_is_unknown() -> None:
    found = read(pipeline_record(ranks=4, microbatches=8))
    facts = found.facts
    assert (facts.schedule, facts.ranks, facts.microbatches, facts.chunks) == ("1f1b", 4, 8, 1)
    assert facts.stages_by_rank == ((0,), (1,), (2,), (3,))
    assert (facts.clock, facts.clock_uncertainty_seconds) == ("one host, one monotonic clock", 0.0)
    assert (facts.comparison, found.launch) == (None, 0)
    few = {"schedule": "gpipe", "ranks": 2, "microbatches": 4, "chunks": 1, "stages_by_rank": [[0], [1]]}
    bare = read(ok(pp(), metrics={}, details={"pipeline": few}))
    told = bare.facts
    assert (told.measured, told.predicted, told.idle, told.clock, bare.activation_bytes) == (None,) * 5
    assert read(record_of()).activation_bytes == 5 << 20  # as measured, or else the fullest rank's
    uncounted = with_metrics(record_of(activation_bytes_by_rank=[7, 9]), memory__activations=None)
    assert read(uncounted).activation_bytes == 9


def test_actions_are_read_by_rank_and_idle_times_with_their_causes() -> None:
    timeline = [[["12F10", 0, 1], ["12I10", 1, 2], ["12W10", 2, 3], ["0B3", 3, 4]], [["1F0", 12, 22]]]
    idle = [[1, 0, 12, "p2p"]]
    facts = read(record_of(stages_by_rank=[[0, 12], [1, 11]], chunks=2, measured=timeline, idle=idle)).facts
    assert facts.measured is not None
    assert [str(ran.action) for ran in facts.measured[0]] == ["12F10", "12I10", "12W10", "0B3"]
    assert (facts.measured[1], facts.idle) == ((Ran("1F0", 12, 22),), (Idle(1, 0, 12, "p2p"),))
    assert Action.parse("12I10") == Action(12, "I", 10)


def test_other_steps_are_no_pipelines_and_the_first_launch_with_a_timeline_tells_one() -> None:
    rows = rows_of(ok(step("ddp")), pipeline_record(), bad(pp("gpipe"), details={"pipeline": pipeline_details()}))
    assert [one.row.case.params["schedule"] for one in pipelines(rows)] == ["1f1b"]
    assert unreadable(rows, read_pipeline) == ()
    assert found_in(ok(step(), details={"pipeline": "of another kind"})) == ()
    without = pipeline_record(launch=0, measured=None, clock="first")
    found = read(without, *(pipeline_record(launch=i, clock=f"launch {i}") for i in (1, 2)))
    assert (found.launch, found.facts.clock) == (1, "launch 1")
    assert read(without).launch == 0


def test_facts_that_contradict_themselves_are_refused() -> None:
    overlap = [[["0F0", 0, 10], ["0F1", 9, 20]], []]
    cases: list[tuple[dict[str, Any], str]] = [
        *(
            ({"measured": [[[name, 0, 1]], []]}, f"{name!r} is no action: it is a stage, F, B, I or W")
            for name in ("F0", "0X1", "0F", "-1F0", "(0F0;1B0)OVERLAP_F_B")
        ),
        ({"predicted": [[["3F0", 0, 1]], []]}, "3F0 ran on rank 0, which holds stages (0,)"),
        ({"measured": overlap}, "0F1 on rank 0 begins at 9 us, before 0F0 ends at 10 us"),
        ({"predicted": overlap}, "0F1 on rank 0 begins at 9 us, before 0F0 ends at 10 us"),
        ({"stages_by_rank": [[0]]}, "stages_by_rank(1) != 2"),
        ({"measured": [[]] * 3}, "a timeline has 3 of 2 ranks"),
        ({"idle": [[2, 0, 1, "rest"]]}, "idle time of ranks {2} of 2"),
        ({"idle": [[0, 0, 1, "lunch"]]}, "Invalid enum value 'lunch'"),
        ({"microbatches": "four"}, "Expected `int`, got `str`"),
        ({"measured": [[["0F0", 0]], []]}, "Expected `array` of at least length 3"),
    ]
    start = "workload.pp schedule=1f1b microbatches=4 layers=4: its details of pipeline cannot be read: "
    for details, words in cases:
        rows = rows_of(record_of(**details))
        (told,) = unreadable(rows, read_pipeline)
        assert told.startswith(start), words
        assert words in told
        assert "\n" not in told
        assert pipelines(rows) == ()


def test_embedded_data_has_no_timelines() -> None:
    record = msgspec.structs.replace(pipeline_record(), details=pipeline_record().details | {"other": {"measured": 1}})
    run = run_of(record, ok(step()))
    summary = summarize(run)
    thin = without_timelines(summary)
    (row, other), (whole, untouched) = thin.rows, summary.rows
    details = common_details(row)
    assert details["pipeline"]["schedule"] == "1f1b"
    assert details["other"]["measured"] == 1
    assert not details["pipeline"].keys() & {"measured", "predicted", "idle"}
    report = report_of(run)
    assert ["0F0" in render(report) for render in (render_json, embedded_json)] == [True, False]
    assert (row.metrics, thin.tally) == (whole.metrics, summary.tally)
    assert other == untouched


def test_a_pipeline_says_all_it_knows_and_a_narrow_terminal_loses_detail_before_comparison() -> None:
    (one,) = found_in(pipeline_record(ranks=4, microbatches=8))
    columns = pipeline_columns([one])
    assert line_of(columns, one) == (
        "schedule: 1f1b | P: 4 | M: 8 | v: 1 | "
        "step time, within this launch: 20.0 ms [18.0, 22.0] | bubble fraction: 26.3 % | "
        "simulated: 23.7 % | formula: 21.0 % | bubble overhead: 35.7 % | fraction of span: 20.0 % | "
        "idle: 5.00 ms | idle: schedule: 3.00 ms | idle: imbalance: 1.00 ms | idle: p2p: 600 us | "
        "idle: rest: 400 us | non-pipeline: 1.00 ms | in flight: 2 | activations: 5.00 MiB"
    )
    assert all(column.help for column in columns)
    sorts = {column.title: column.sort(one) for column in columns}
    causes = [float(str(sorts[title])) for title in sorts if title.startswith("idle: ")]
    assert len(causes) == 4
    assert sum(causes) == pytest.approx(sorts["idle"])
    # neither halves nor what is below nothing are rounded away
    odd = read(with_metrics(pipeline_record(), in_flight=plain(5.5, "microbatches"), idle_rest=plain(-0.001, "s")))
    cells = cells_of(pipeline_columns([odd]), odd)
    assert (cells["in flight"], cells["idle: rest"]) == ("5.5", "-1.00 ms")


def labels_of(*records: Record) -> list[str]:
    found = found_in(*records)
    labels = list(schedule_labels(found).values())
    assert [pipeline_columns(found)[0].text(one) for one in found] == labels
    return labels


def test_a_pipeline_is_named_by_its_schedule_and_what_has_no_column() -> None:
    records = [pipeline_record(hidden=64), pipeline_record(hidden=128, microbatches=8), pipeline_record("zb")]
    assert labels_of(*records) == ["1f1b hidden=64", "1f1b hidden=128", "zb"]
    assert labels_of(pipeline_record(), pipeline_record(microbatches=8)) == ["1f1b", "1f1b"]
    # orders of one's own are told apart by their ids, not by all their actions
    cases = [pp("1f1b", order=order) for order in ("0F0,0B0;1F0,1B0", "0F0,,0B0;1F0,1B0")]
    facts = {"pipeline": pipeline_details() | {"schedule": "custom"}}
    mine = [ok(case, metrics=pipeline_metrics(), details=facts) for case in cases]
    assert labels_of(*mine) == [f"custom ({case.id})" for case in cases]
    assert labels_of(mine[0], pipeline_record()) == ["custom", "1f1b"]
    assert labels_of(record_of(schedule="\x1b[1mbold")) == ["\\x1b[1mbold"]  # nothing that a terminal obeys


OTHERS = [simulated("gpipe", 0.030), simulated("1f1b", 0.011), simulated("zb_v", 0.018, 2)]
REFUSED = simulated("dualpipe_v", chunks=2, why_not="dualpipe_v needs microbatches(4) >= stages(8)")


def compared(*records: Record) -> tuple[Comparison, ...]:
    return comparisons(found_in(*records))


def only(*records: Record) -> Comparison:
    (found,) = compared(*records)
    return found


def order(*records: Record) -> list[str]:
    return [entry.label for entry in only(*records).entries]


def test_schedules_stand_by_step_time_and_a_measured_one_replaces_its_simulation() -> None:
    found = only(pipeline_record(seconds=0.020, comparison=OTHERS))
    told = [(one.label, one.simulated.measured, one.simulated.step_seconds) for one in found.entries]
    assert told == [("zb_v", False, 0.018), ("1f1b", True, 0.020), ("gpipe", False, 0.030)]
    mine = found.entries[1].simulated
    assert (mine.bubble_fraction, mine.in_flight, mine.activation_bytes) == (0.263, 2.0, 5 << 20)
    assert found.title == "2 ranks, 4 microbatches"
    # the same schedule with other chunks is another
    others = [simulated("1f1b", 0.011, chunks=2)]
    found = only(pipeline_record(seconds=0.020, comparison=others))
    assert [(one.label, one.simulated.chunks) for one in found.entries] == [("1f1b", 2), ("1f1b", 1)]
    found = only(pipeline_record(seconds=0.020, chunks=2, comparison=[*others, simulated("zb_v", 0.1, 2)]))
    assert [one.simulated.chunks for one in found.entries if one.label == "1f1b"] == [2]
    assert compared(pipeline_record()) == comparisons(()) == ()  # one alone


def test_what_cannot_run_stands_last_and_what_has_no_time_before_it() -> None:
    unknown = with_metrics(pipeline_record("gpipe"), step_time=plain(None, "s"))
    records = pipeline_record(seconds=99.0, comparison=[REFUSED, simulated("naive"), *OTHERS]), unknown
    assert order(*records) == ["zb_v", "1f1b", "gpipe", "naive", "dualpipe_v"]
    assert only(*records).entries[2].simulated.step_seconds is None
