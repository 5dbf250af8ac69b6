"""The columns of expert-parallel steps, as data: what routing makes of loads, bytes and time, and each rank's load.

What no row knows has no column.
"""

from collections.abc import Sequence

from reports import cells
from reports.columns import Column, figure, headline, known, lifted, metric_column, metric_columns, words
from reports.labels import differences, short_labels
from reports.parallel.experts import Mixture, Share

_MOST_LISTED = 16
_OWN = ("routing", "capacity", "ep", "variant")


def mixture_columns(found: Sequence[Mixture]) -> tuple[Column[Mixture], ...]:
    """Return the columns of expert-parallel steps."""
    others = differences([one.row for one in found], _OWN)
    shown = (
        *metric_columns("experts", rows := [one.row for one in found]),
        *known((metric_column("bytes_ratio.ep", 3), metric_column("exposed_comm.ep", 3)), rows),
    )
    return (
        words("scope", lambda one: cells.visible(f"{one.scope} {others[one.row.case.id]}"), "what is timed"),
        words("routing", lambda one: cells.visible(one.routing) or cells.UNKNOWN, "how experts are chosen"),
        figure("capacity", lambda one: one.capacity, _capacity, "factor above which tokens drop; dropless has none"),
        figure("EP", lambda one: one.ep, cells.whole, "ranks that experts are dealt out to"),
        words("variant", lambda one: cells.visible(one.variant) or cells.UNKNOWN, "how tokens get there and back", 7),
        lifted(headline("step_time"), lambda one: one.row),
        *(lifted(column, lambda one: one.row) for column in shown),
        words("claim", lambda one: one.claim or cells.UNKNOWN, "what the scope may be used to claim", drop=10),
    )


def claims(found: Sequence[Mixture]) -> tuple[str, ...]:
    """Return what the scopes may be used to claim, each once."""
    return tuple(dict.fromkeys(one.claim for one in found if one.claim))


def share_columns(found: Sequence[Share]) -> tuple[Column[Share], ...]:
    """Return the columns of expert loads, rank by rank."""
    labels = short_labels([row.mixture.row for row in {one.mixture.row.case.id: one for one in found}.values()])
    layer: Column[Share] = words("layer", _layer, "the layer, from 0, or all where all are alike")
    return (
        words("step", lambda one: labels[one.mixture.row.case.id], "the step, with what tells steps apart"),
        *((layer,) if any(len(one.mixture.facts.expert_load) > 1 for one in found) else ()),
        figure("capacity", lambda one: one.mixture.capacity, _capacity, "factor above which tokens drop", 2),
        figure("rank", lambda one: one.rank, cells.whole, "the rank among those that experts are dealt out to"),
        words("experts", _experts, "the rank's experts"),
        figure("chosen", lambda one: sum(one.chosen), cells.whole, "tokens that chose one of them, of all sources"),
        figure("of mean", lambda one: one.of_mean, cells.formatted("{:.2f}"), "the same over an even share"),
        figure("kept", lambda one: one.kept, cells.whole, "pairs that the rank gets, dropped ones left out"),
        words("by expert", _listed, "tokens that chose each, or the least and the most of them", 1),
    )


def _layer(one: Share) -> str:
    layers = one.mixture.layers
    return str(one.layer) if len(layers) == len(one.mixture.facts.expert_load) else "all"


def _experts(one: Share) -> str:
    last = one.first_expert + len(one.chosen) - 1
    return str(last) if last == one.first_expert else f"{one.first_expert} to {last}"


def _listed(one: Share) -> str:
    if len(one.chosen) > _MOST_LISTED:
        return f"{min(one.chosen)} to {max(one.chosen)}"
    return " ".join(map(str, one.chosen))


def _capacity(value: float | None) -> str:
    return "dropless" if value is None else f"{value:g}"
