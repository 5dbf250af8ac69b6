"""The report on expert parallelism: steps of each scope, routing against capacity, and who is chosen. Pure."""

from collections.abc import Iterable
from typing import Any

from reports.findings import Findings
from reports.panels import Panel, Section
from reports.parallel.experts import distinct, read_mixture, shares
from reports.parallel.experts_atlas import atlas_columns, atlases
from reports.parallel.experts_columns import claims, mixture_columns, share_columns
from reports.summary import unreadable


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
