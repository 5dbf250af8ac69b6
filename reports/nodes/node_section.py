"""The report on where ranks ran: hosts, ranks, switches and cores. Pure."""

from reports.findings import Findings
from reports.nodes.node_columns import node_columns, node_notes, node_rows
from reports.panels import Panel, Section


def node_section(found: Findings) -> Section | None:
    """Return the table of the run's nodes; None where all ranks are on one, or the run does not tell."""
    if found.nodes is None:
        return None
    panel = Panel(
        id="nodes-table",
        title="Nodes",
        caption="where each rank ran, hosts under one switch side by side",
        columns=node_columns(),
        rows=node_rows(found.nodes),
        notes=node_notes(found.nodes),
    )
    return Section(id="nodes", title="Nodes", panels=(panel,))
