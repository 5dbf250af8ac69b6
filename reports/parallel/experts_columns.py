"""The columns of expert-parallel steps, as data: what routing makes of loads, bytes and time, and each rank's load.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.columns import Column, figure, known, words
from reports.labels import differences, short_labels
from reports.parallel.experts import Mixture, Share
from reports.parallel.experts_atlas import times

_MOST_LISTED = 16
_OWN = ("routing", "capacity", "ep", "variant")


def mixture_columns(found: Sequence[Mixture]) -> tuple[Column[Mixture], ...]:
    """Return the columns of expert-parallel steps."""
    others = differences([one.row for one in found], _OWN)
    lost_help = "the step less the same under balanced routes, in turns; 0 where routing is balanced"
    columns: tuple[Column[Mixture], ...] = (
        _metric("rank load", "imbalance.rank", _ratio, "pairs that ranks get, max over mean, the worst layer", 1),
        _metric(
            "expert load", "imbalance.expert", _ratio, "tokens that chose an expert, max over mean, worst layer", 2
        ),
        _metric("dropped", "drop_rate", cells.percent, "pairs dropped over pairs routed", 1),
        _metric("expected", "drop_rate_expected", cells.percent, "drop rate in closed form, of generators", 8),
        _metric("bytes ratio", "bytes_ratio.ep", _thousandths, "bytes sent over those of the routes' closed form", 3),
        _metric("dedup", "dedup_ratio", _thousandths, "rows of token and rank per pair of token and expert sent", 6),
        *(_bandwidth(way, kind) for way in ("dispatch", "combine") for kind in ("wire", "logical")),
        _metric(
            "exposed ep", "exposed_comm.ep", cells.duration, "all-to-alls that nothing hides, of the traced step", 3
        ),
        _metric("lost", "imbalance_lost", cells.duration, lost_help, 2),
        _metric("slow-down", "imbalance_slowdown", times, "the step over the same under balanced routes, in turns", 4),
    )
    return (
        words("scope", lambda one: cells.visible(f"{one.scope} {others[one.row.case.id]}"), "what is timed"),
        words("routing", lambda one: cells.visible(one.routing) or cells.UNKNOWN, "how experts are chosen"),
        figure("capacity", lambda one: one.capacity, _capacity, "factor above which tokens drop; dropless has none"),
        figure("EP", lambda one: one.ep, _whole, "ranks that experts are dealt out to"),
        words("variant", lambda one: cells.visible(one.variant) or cells.UNKNOWN, "how tokens get there and back", 7),
        Column(
            title="step time",
            text=lambda one: cells.measured(one.row.metrics.get(one.row.headline)),
            sort=lambda one: one.row.value(one.row.headline),
            help="median with its 95 % interval, of the scope",
        ),
        *known(columns, found),
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
        figure("rank", lambda one: one.rank, _whole, "the rank among those that experts are dealt out to"),
        words("experts", _experts, "the rank's experts"),
        figure("chosen", lambda one: sum(one.chosen), _whole, "tokens that chose one of them, of all sources"),
        figure("of mean", lambda one: one.of_mean, _ratio, "the same over an even share"),
        figure("kept", lambda one: one.kept, _whole, "pairs that the rank gets, dropped ones left out"),
        words("by expert", _listed, "tokens that chose each, or the least and the most of them", 1),
    )


def _metric(title: str, name: str, text: Callable[[float | None], str], help_text: str, drop: int) -> Column[Mixture]:
    return figure(title, lambda one: one.row.value(name), text, help_text, drop)


def _bandwidth(way: str, kind: str) -> Column[Mixture]:
    what = "what leaves the busiest rank" if kind == "wire" else "all pairs, those that stay too"
    title, drop = (f"{way} GB/s", 5) if kind == "wire" else (f"{way} GB/s (logical)", 9)
    return _metric(title, f"{way}_bandwidth.{kind}", cells.gigabytes, f"{what}, over the {way}'s time alone", drop)


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


def _whole(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.2f}"


def _thousandths(value: float | None) -> str:
    return cells.UNKNOWN if value is None else f"{value:.3f}"
