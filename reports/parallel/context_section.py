"""The report on context parallelism: steps, their methods compared, and each communication exposed. Pure."""

from typing import Any

from reports.findings import Findings
from reports.panels import Panel, Section
from reports.parallel.context import hops, read_context
from reports.parallel.context_columns import context_columns, hop_columns
from reports.summary import unreadable


def context_section(found: Findings) -> Section | None:
    """Return the tables of context-parallel steps; the comparisons' sentences stand below the first."""
    unread = unreadable(found.steps, read_context)
    panels: list[Panel[Any]] = []
    if found.contexts:
        panels.append(
            Panel(
                id="context-table",
                title="Attention over ranks",
                caption="bytes each way, how even the ranks' pairs are, and what communication is exposed",
                columns=context_columns(found.contexts),
                rows=found.contexts,
                notes=tuple(sentence for one in found.context_comparisons for sentence in one.sentences),
                is_wide=True,
            )
        )
    if lines := hops(found.contexts):
        panels.append(
            Panel(
                id="context-hops",
                title="Attention's communications, one by one",
                caption="of the first launch that tells them: each step of a ring beside what it takes alone",
                columns=hop_columns(lines),
                rows=lines,
            )
        )
    if not panels and not unread:
        return None
    return Section(id="context", title="Context parallelism", panels=tuple(panels), notes=unread)
