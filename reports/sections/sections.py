"""A run's report as sections, in the order in which they are read. Pure."""

from collections.abc import Callable

from reports.analysis.findings import Findings
from reports.sections.communication_section import (
    arrival_section,
    communication_section,
    contrast_section,
    group_section,
    pair_section,
)
from reports.sections.node_section import node_section
from reports.sections.panels import Section
from reports.sections.parallel_sections import context_section, experts_section
from reports.sections.step_section import predicted_section, step_section

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
