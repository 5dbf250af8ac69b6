"""The report on context parallelism: steps, their methods compared, and each communication exposed. Pure."""

from collections.abc import Iterable
from typing import Any

from reports.analysis.attention import hops, read_context
from reports.analysis.experts import atlas_columns, atlases, distinct, read_mixture, shares
from reports.analysis.findings import Findings
from reports.analysis.summary import unreadable
from reports.sections.panels import Panel, Section
from reports.sections.parallel_columns import claims, context_columns, hop_columns, mixture_columns, share_columns


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


def experts_section(found: Findings) -> Section | None:
    """Return the tables of expert-parallel steps."""
    unread = unreadable(found.steps, read_mixture)
    if not found.mixtures and not unread:
        return None
    return Section(id="experts", title="Expert parallelism", panels=tuple(_panels(found)), notes=unread)


def _panels(found: Findings) -> Iterable[Panel[Any]]:
    if not found.mixtures:
        return
    # sentences would make the table wider than any page: they stand below it
    columns = tuple(one for one in mixture_columns(found.mixtures) if one.title != "claim")
    yield Panel(
        id="experts-table",
        title="Experts over ranks",
        caption="loads, drops, bytes and what imbalance costs; scopes do not compare with each other",
        columns=columns,
        rows=found.mixtures,
        notes=claims(found.mixtures),
    )
    for i, atlas in enumerate(atlases(found.mixtures), start=1):
        yield Panel(
            id=f"experts-atlas-{i}",
            title=atlas.title,
            caption="time, slow-down against balanced routes, and pairs dropped",
            columns=atlas_columns(atlas),
            rows=atlas.routings,
            notes=claims(tuple(atlas.cells.values())),
            is_wide=True,
        )
    lines = shares(distinct(found.mixtures))
    yield Panel(
        id="experts-load",
        title="Who is chosen",
        caption="tokens by rank and expert in the step explained, each routing once",
        columns=share_columns(lines),
        rows=lines,
        is_wide=True,
    )
