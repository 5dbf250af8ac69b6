"""The nodes' section: there where ranks are on several, at the head of the others."""

from nodes_fixtures import node_run
from reports_fixtures import sample_run

from reports.findings import find
from reports.nodes.node_section import node_section
from reports.sections import sections
from reports.summary import summarize


def test_several_nodes_have_a_section_before_all_others() -> None:
    run = node_run()
    first, *_ = sections(find(run, summarize(run)))
    assert (first.id, first.panels[0].id) == ("nodes", "nodes-table")
    assert len(first.panels[0].rows) == 4
    assert first.panels[0].notes[0].startswith("Placement of 8 ranks on 4 nodes")


def test_one_node_has_none() -> None:
    run = sample_run()
    assert node_section(find(run, summarize(run))) is None
