"""Several runs as tables: who they are, in what they differ, how they scale, and how their times compare."""

import msgspec
from nodes_fixtures import lost_run, node_run, scaling_run
from reports_fixtures import WORLD, collective, context_record, make_plan, make_run, ok, step

from bench.runs import Run
from reports.illustrations import scaling_figures
from reports.nodes.sweep_folder import Point
from reports.several import Several, several
from reports.several_sections import MOST_LINES, scaling_lines, several_sections, terminal_sections
from reports.summary import summarize


def run_on(ranks: int, seconds: float = 1e-3) -> Run:
    world = msgspec.structs.replace(WORLD, size=ranks)
    records = [ok(step(), seconds=seconds, world=world), ok(collective(), seconds=seconds, world=world)]
    run = make_run(make_plan([record.case for record in records]), records)
    plan = msgspec.structs.replace(run.info.plan, nproc=ranks)
    return msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, id=f"run-on-{ranks}", plan=plan))


def of(*runs: Run) -> Several:
    return several([(run, summarize(run)) for run in runs])


def cells(found: Several, panel_id: str) -> list[dict[str, str]]:
    (panel,) = [panel for section in several_sections(found) for panel in section.panels if panel.id == panel_id]
    return [{column.title: column.text(row) for column in panel.columns} for row in panel.rows]


def test_each_run_is_told_with_its_verdict() -> None:
    first, second = cells(of(run_on(2), run_on(4)), "runs-table")
    assert (first["run"], first["id"], first["verdict"]) == ("run 1", "run-on-2", "fine: 2 ok")
    assert "4 ranks on 1 node" in second["what"]


def test_differences_are_told_run_by_run() -> None:
    assert cells(of(run_on(2), run_on(4)), "differences-table") == [{"what": "plan.nproc", "run 1": "2", "run 2": "4"}]


def test_worlds_of_other_sizes_scale() -> None:
    step_line, busbw = cells(of(run_on(2), run_on(4, 2e-3)), "scaling-table")
    assert step_line["case"] == "ddp"
    assert (step_line["2 ranks"], step_line["4 ranks"], step_line["efficiency 4"]) == ("4100000", "2050000", "25.0 %")
    assert (busbw["rate"], busbw["efficiency 4"]) == ("busbw", "50.0 %")
    assert busbw["case"] == "all_reduce 1K blocking float32"
    assert scaling_lines(of(run_on(2), run_on(4, 2e-3))) == [
        ("ddp", {2: 1.0, 4: 0.25}),
        ("all_reduce 1K blocking float32", {2: 1.0, 4: 0.5}),
    ]


def test_times_stand_side_by_side_with_their_ratio() -> None:
    first, _ = cells(of(run_on(2), run_on(2, 2e-3)), "beside-table")
    assert first["run 1"] == "1.00 ms [0.900, 1.10]"
    assert first["run 2 / first"].startswith("2.00 [1.7")


def test_what_there_is_nothing_of_has_no_section() -> None:
    ids = [section.id for section in several_sections(of(run_on(2), run_on(2)))]
    assert ids == ["runs", "differences", "beside"]
    other = make_run(make_plan([]), [ok(step("fsdp"))])
    assert [section.id for section in several_sections(of(run_on(2), other))] == ["runs", "differences"]
    same = several_sections(of(run_on(2), run_on(2)))[1]
    assert same.panels == ()
    assert same.notes[0].startswith("They differ in nothing but")


def test_what_a_run_cannot_show_is_said_of_it() -> None:
    run = run_on(4)
    plan = msgspec.structs.replace(run.info.plan, notes=("functional only: 4 ranks on 2 cores",))
    shared = msgspec.structs.replace(run, info=msgspec.structs.replace(run.info, plan=plan))
    runs = several_sections(of(run_on(2), shared))[0]
    assert runs.notes == ("What run 2 cannot show: functional only: 4 ranks on 2 cores",)


def test_of_very_many_cases_the_first_are_drawn_and_all_are_in_the_table() -> None:
    def run(ranks: int) -> Run:
        world = msgspec.structs.replace(WORLD, size=ranks)
        return make_run(make_plan([]), [ok(collective(size_bytes=1024 * (i + 1)), world=world) for i in range(20)])

    found = of(run(2), run(4))
    assert len(scaling_lines(found)) == MOST_LINES == 12
    (panel,) = [panel for section in several_sections(found) for panel in section.panels if panel.id == "scaling-table"]
    assert len(panel.rows) == 20
    assert panel.notes == ("The first 12 of 20 cases are drawn.",)


def test_context_parallel_steps_of_several_worlds_stand_against_their_ranks() -> None:
    """Two runs of two methods on 2 and 4 ranks: one table, with where Ulysses begins to send less."""
    runs = []
    for n in (2, 4):
        records = [context_record(method, 0.1 / n, ranks=n) for method in ("ring", "ulysses")]
        runs.append(make_run(make_plan([record.case for record in records]), records))
    found = of(*runs)
    rows = cells(found, "context-sizes-1")
    assert [(row["method"], row["cp"]) for row in rows] == [
        ("ring", "2"),
        ("ulysses", "2"),
        ("ring", "4"),
        ("ulysses", "4"),
    ]
    (section,) = [one for one in several_sections(found) if one.id == "context-sizes"]
    assert "Ulysses sends less than a ring above" in section.panels[0].notes[0]
    assert list(scaling_figures(found)["context-sizes-1"])


def test_without_them_there_is_no_such_section() -> None:
    assert "context-sizes" not in {section.id for section in several_sections(of(run_on(2), run_on(4)))}


def test_runs_on_several_nodes_say_on_which_and_how_placed() -> None:
    first, second = cells(of(node_run("cyclic"), scaling_run(1, 2)), "runs-table")
    assert (first["nodes"], first["placement"], first["hosts"]) == ("4", "cyclic", "n1, n2, n3, n4")
    assert (second["nodes"], second["placement"], second["hosts"]) == ("1", "-", "n1")


def test_a_sweeps_runs_have_their_points_and_one_line_on_what_they_are() -> None:
    runs = [scaling_run(2), scaling_run(4)]
    points = [Point(id="a", label="2 nodes"), Point(id="b", label="4 nodes")]
    found = several([(run, summarize(run)) for run in runs], points)
    first, _ = cells(found, "runs-table")
    assert (first["point"], "what" in first) == ("2 nodes", False)
    section, *_ = several_sections(found)
    assert section.notes[-1].startswith("Run 1: preset node: 2 ranks on 2 nodes")


def test_over_nodes_takes_the_place_of_scaling_by_ranks() -> None:
    """By ranks, block and cyclic runs of one size would be one series, and the first would hide the other."""
    found = of(scaling_run(2, 2), scaling_run(4, 2), scaling_run(4, 2, "cyclic"))
    ids = [section.id for section in several_sections(found)]
    assert "over-nodes" in ids
    assert "scaling" not in ids
    assert scaling_lines(of(scaling_run(2), scaling_run(4))) == []


def test_many_runs_share_a_column_of_differences_and_are_not_side_by_side() -> None:
    found = of(*(run_on(2 + i // 9) for i in range(10)))
    (line,) = cells(found, "differences-table")
    assert line == {"what": "plan.nproc", "values": "2 (run 1-9); 3 (run 10)"}
    assert "beside" not in [section.id for section in several_sections(found)]


def test_a_terminal_has_what_does_not_widen_with_the_runs() -> None:
    ids = [section.id for section in terminal_sections(of(node_run(), scaling_run(1, 2), scaling_run(2, 2)))]
    assert ids == ["runs", "over-nodes", "far"]


def test_a_point_that_ran_again_is_told_and_a_run_that_ran_describes_the_sweep() -> None:
    lost, fine = lost_run(), scaling_run(4)
    point = Point(id="a", label="4 nodes")
    section, *_ = several_sections(several([(run, summarize(run)) for run in (lost, fine)], [point, point]))
    assert section.notes[0] == "Run again later, so not counted in the verdict: run 1."
    assert section.notes[1].startswith("Run 2: preset node: 4 ranks on 4 nodes")
