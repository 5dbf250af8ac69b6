"""A run's report as sections, in the order in which they are read. Pure."""

from collections.abc import Callable

from reports.communication_section import (
    arrival_section,
    communication_section,
    contrast_section,
    group_section,
    pair_section,
)
from reports.findings import Findings
from reports.nodes.node_section import node_section
from reports.panels import Section
from reports.parallel.context_section import context_section
from reports.parallel.experts_section import experts_section
from reports.predicted_section import predicted_section
from reports.step_section import step_section

SECTIONS: tuple[Callable[[Findings], Section | None], ...] = (
    node_section,
    communication_section,
    contrast_section,
    group_section,
    pair_section,
    step_section,
    context_section,
    experts_section,
    arrival_section,
    predicted_section,
)


def sections(found: Findings) -> tuple[Section, ...]:
    """Return the sections that have anything to show."""
    return tuple(section for make in SECTIONS if (section := make(found)) is not None)
