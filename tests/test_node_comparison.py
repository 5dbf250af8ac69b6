"""Several runs over nodes as tables: problems with their ranks, rates by nodes, within and across, environments."""

from typing import Any

import pytest
from nodes_fixtures import lost_run, node_run, scaling_run
from reports_fixtures import sample_run

from bench.runs import Run
from reports.nodes.node_comparison import (
    MOST_LINES,
    efficiency_lines,
    environment_section,
    far_section,
    over_nodes_section,
    problem_section,
    rate_lines,
    run_words,
    time_lines,
)
from reports.nodes.sweep_folder import Point
from reports.panels import Section
from reports.several import Several, several
from reports.summary import summarize


def of(*runs: Run, points: tuple[Point, ...] = ()) -> Several:
    return several([(run, summarize(run)) for run in runs], points)


def lines(section: Section | None) -> list[dict[str, str]]:
    assert section is not None
    (panel,) = section.panels
    told: list[dict[str, str]] = [{column.title: column.text(row) for column in panel.columns} for row in panel.rows]
    return told


def scaling(**more: Any) -> Several:
    return of(*(scaling_run(nodes, 2, **more) for nodes in (1, 2, 4)))


def test_what_went_wrong_is_told_with_its_point_and_its_host() -> None:
    found = of(scaling_run(2), lost_run(), points=(Point(id="a"), Point(id="b", label="4 nodes x 1")))
    (line,) = lines(problem_section(found))
    assert (line["run"], line["status"]) == ("run 2: 4 nodes x 1", "hang")
    assert line["reason"] == "no end within 10 s: rank 2 (n3) did not arrive"
    assert problem_section(of(scaling_run(2))) is None


def test_a_run_is_called_by_its_point_where_it_has_one() -> None:
    assert [run_words(one) for one in of(scaling_run(1), scaling_run(2), points=(Point(id="ab"),)).runs] == [
        "run 1: ab",
        "run 2",
    ]


def test_rates_and_times_stand_by_nodes_with_their_efficiency() -> None:
    small, big, ddp = lines(over_nodes_section(scaling()))
    assert (small["case"], small["placement"]) == ("all_reduce 64K blocking float32", "block")
    assert (big["what"], big["ranks a node"]) == ("busbw", "2")
    assert (big["1 node"], big["2 nodes"]) == ("3.93 GB/s", "0.499 GB/s")
    assert (big["efficiency 2 nodes"], big["efficiency 4 nodes"]) == ("12.7 %", "6.36 %")
    assert (ddp["what"], ddp["1 node"], ddp["4 nodes"], ddp["efficiency 4 nodes"]) == (
        "step time",
        "10.0 ms",
        "20.0 ms",
        "50.0 %",
    )


def test_what_a_series_lacks_is_unknown() -> None:
    found = of(scaling_run(2, 1), scaling_run(4, 1), scaling_run(1, 2), scaling_run(4, 2))
    first, other = lines(over_nodes_section(found))[:2]
    assert (first["1 node"], first["efficiency 2 nodes"]) == ("-", "-")
    assert (other["2 nodes"], other["efficiency 2 nodes"]) == ("-", "-")
    assert first["efficiency 4 nodes"] != "-"


def test_repeats_are_told() -> None:
    section = over_nodes_section(of(scaling_run(1), scaling_run(2), scaling_run(2)))
    assert section is not None
    assert section.panels[0].notes == ("Up to 2 repeats: the one with the median time is shown.",)
    assert over_nodes_section(of(scaling_run(2))) is None


def test_figures_have_the_first_lines_of_each_kind() -> None:
    found = scaling()
    assert [label for label, _ in rate_lines(found)] == [
        "all_reduce 64K blocking float32",
        "all_reduce 4M blocking float32",
    ]
    assert rate_lines(found)[1][1][4] == pytest.approx(0.25, rel=0.01)
    ((label, times),) = time_lines(found)
    assert label == "ddp"
    assert times[1] == pytest.approx(0.01)
    assert efficiency_lines(found)[2][1] == {1: 1.0, 2: pytest.approx(0.59, rel=0.02), 4: pytest.approx(0.5)}
    assert len(efficiency_lines(found)) <= MOST_LINES


def test_what_is_left_across_nodes_is_told_run_by_run() -> None:
    line, other = lines(far_section(of(node_run("block"), scaling_run(2), node_run("cyclic"))))
    assert line == {
        "run": "run 1",
        "operation": "all_reduce 4M blocking float32",
        "within": "3.93",
        "across": "0.499",
        "across / within": "0.127",
    }
    assert other["run"] == "run 3"
    assert far_section(of(sample_run())) is None


def test_environments_have_a_column_each_and_a_ratio_to_the_first() -> None:
    points = (Point(id="a", environment="plain"), Point(id="b", environment="tuned"))
    found = of(scaling_run(2), scaling_run(2, factor=2.0), points=points)
    line = lines(environment_section(found))[-1]
    assert (line["case"], line["nodes"]) == ("ddp", "2")
    assert line["plain"].startswith("16.8 ms [")
    assert line["tuned / first"].startswith("0.500 [")
    assert environment_section(of(scaling_run(2))) is None


def test_a_case_that_an_environment_lacks_is_unknown_there() -> None:
    names = ("plain", "tuned", "third")
    points = tuple(Point(id=f"{name}{i}", environment=name) for i, name in enumerate(names))
    runs = (scaling_run(2), scaling_run(2, factor=2.0), scaling_run(4))
    line = lines(environment_section(of(*runs, points=points)))[0]
    assert (line["third"], line["third / first"]) == ("-", "-")
