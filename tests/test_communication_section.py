"""The report on communication: a panel for each series, words explained, sections only where there is news."""

from typing import Any

from reports_fixtures import collective, collective_metrics, curve_records, make_plan, make_run, ok, seconds_metric

from bench.arrival import Arrival
from bench.cases import make_case
from bench.records import Record
from reports.communication_section import (
    arrival_section,
    communication_section,
    contrast_section,
    group_section,
    late_label,
    pair_section,
    series_of,
    series_words,
)
from reports.findings import Findings, find
from reports.summary import summarize


def found_in(*records: Record) -> Findings:
    run = make_run(make_plan([record.case for record in records]), records)
    return find(run, summarize(run))


def pair(source: int, target: int) -> Record:
    params: dict[str, Any] = {
        "size_bytes": 1024,
        "dtype": "float32",
        "mode": "blocking",
        "source": source,
        "target": target,
    }
    return ok(make_case("p2p.matrix", "m:f", params))


def test_each_series_is_a_panel_whose_title_says_mode_and_type() -> None:
    section = communication_section(found_in(ok(collective()), ok(collective(mode="pipelined")), ok(collective(a=1))))
    assert section is not None
    assert [(panel.id, panel.title, len(panel.rows)) for panel in section.panels] == [
        ("communication-1", "blocking, float32", 2),
        ("communication-2", "pipelined, float32", 1),
    ]
    titles = [column.title for column in section.panels[0].columns]
    assert titles[:3] == ["operation", "size", "time"]
    assert "mode" not in titles
    assert all(panel.has_facts for panel in section.panels)


def test_words_are_explained_with_their_formulas_where_they_stand() -> None:
    section = communication_section(found_in(*curve_records()))
    assert section is not None
    told = {term.name: term.text for term in section.terms}
    assert "2(n-1)/n for all_reduce" in told["busbw"]
    assert "latency + size / bandwidth" in told["fit"]
    assert section.panels[-1].id == "fits"
    assert section.panels[-1].notes[0].startswith("Fits: ")
    plain = communication_section(found_in(ok(collective())))
    assert plain is not None
    assert "fit" not in {term.name for term in plain.terms}


def test_a_series_without_mode_or_type_is_called_by_what_there_is() -> None:
    assert series_words(("blocking", "-")) == "blocking"
    assert series_words(("-", "-")) == "without mode or type"
    rows = found_in(ok(make_case("collective.barrier", "m:f", {"mode": "blocking"}))).communication
    assert list(series_of(rows)) == [("blocking", "-")]


def test_loads_and_groups_have_sections_of_their_own() -> None:
    found = found_in(ok(collective()), ok(collective(beside="gemm"), seconds=2e-3))
    section = contrast_section(found)
    assert section is not None
    assert section.panels[0].title == "Interference: slow-down beside a load"
    assert group_section(found) is None
    groups = group_section(found_in(ok(collective(group="pairs", member=0)), ok(collective(group="pairs", member=1))))
    assert groups is not None
    assert groups.panels[0].id == "operation-group"


def test_pairs_are_a_section_and_no_communication() -> None:
    found = found_in(pair(0, 1), pair(1, 0))
    section = pair_section(found)
    assert section is not None
    assert len(section.panels[0].rows) == 2
    assert communication_section(found) is None


def test_late_ranks_are_named_with_their_share_and_the_clock() -> None:
    metrics = collective_metrics(collective(), 1e-3) | {"skew": seconds_metric(5e-5)}
    arrival = Arrival(
        method="ping-pong", uncertainty=2e-6, late_rank=3, share=0.75, last_out_rank=None, last_out_share=None
    )
    section = arrival_section(found_in(ok(collective(), metrics=metrics, arrival=arrival)))
    assert section is not None
    (panel,) = section.panels
    told = {column.title: column.text(panel.rows[0]) for column in panel.columns}
    assert (told["case"], told["late rank"], told["in"]) == ("all_reduce 1K blocking float32", "rank 3", "75.0 %")
    assert (told["skew"], told["last out"]) == ("50.0 us", "-")
    assert panel.notes == ("Clocks: ping-pong, right within 2.00 us.",)
    (number,) = [column.sort(panel.rows[0]) for column in panel.columns if column.title == "late rank"]
    assert number == 3


def test_runs_without_any_of_it_have_no_sections() -> None:
    found = found_in()
    for make in (communication_section, contrast_section, group_section, pair_section, arrival_section):
        assert make(found) is None


def test_a_line_alone_names_size_mode_and_type() -> None:
    (row,) = found_in(ok(collective("broadcast", 65536, root=1))).communication
    assert late_label(row) == "broadcast root=1 64K blocking float32"
