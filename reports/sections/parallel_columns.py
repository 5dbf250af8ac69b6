"""The columns of the pipeline steps' tables, as data: bubbles beside what explains them, and schedules side by side.

What no row knows has no column.
"""

from collections.abc import Callable, Sequence

from reports import cells
from reports.analysis.attention import Context, Hopped
from reports.analysis.experts import Mixture, Share
from reports.analysis.labels import differences, short_labels
from reports.analysis.pipelines import Entry, Pipeline, schedule_labels
from reports.sections.columns import Column, T, figure, headline, known, lifted, metric_column, metric_columns, words

_count = cells.formatted("{:.4g}")


def pipeline_columns(found: Sequence[Pipeline]) -> tuple[Column[Pipeline], ...]:
    """Return the columns of pipeline steps: times are means over ranks, of the traced pass."""
    activations: Column[Pipeline] = figure(
        "activations", lambda one: one.activation_bytes, cells.num_bytes, "memory of activations, the fullest rank", 7
    )
    return (
        _names(found),
        figure("P", lambda one: one.facts.ranks, _count, "ranks of the pipeline", 0),
        figure("M", lambda one: one.facts.microbatches, _count, "microbatches of a step", 0),
        figure("v", lambda one: one.facts.chunks, _count, "stages of a rank, its chunks", 0),
        lifted(headline("step_time"), lambda one: one.row),
        *(lifted(column, lambda one: one.row) for column in metric_columns("pipelines", [one.row for one in found])),
        *known((activations,), found),
    )


def compared_columns(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of schedules side by side."""
    measured: tuple[Column[Entry], ...] = (
        figure("bubble fraction", lambda one: one.simulated.bubble_fraction, cells.percent, "by makespan", 0),
        figure("in flight", lambda one: one.simulated.in_flight, _count, "microbatches that a rank holds, at most", 3),
        figure(
            "activations",
            lambda one: one.simulated.activation_bytes,
            cells.num_bytes,
            "the fullest rank's, measured or what its layers hold",
            2,
        ),
    )
    return (
        words("schedule", lambda one: cells.visible(one.label), "the order of actions"),
        figure("v", lambda one: one.simulated.chunks, _count, "stages of a rank, its chunks", 0),
        figure("step time", lambda one: one.simulated.step_seconds, cells.duration, "measured or simulated", 0),
        words("source", _source, "measured by a case of this run, or simulated from the first one's times"),
        *known(measured, entries),
        *((_reason(),) if any(one.simulated.why_not for one in entries) else ()),
    )


def _names(found: Sequence[Pipeline]) -> Column[Pipeline]:
    labels = schedule_labels(found)
    help_text = "the order of actions, with the parameters in which steps differ"
    return words("schedule", lambda one: labels[one.row.case.id], help_text)


def _source(entry: Entry) -> str:
    if entry.simulated.why_not:
        return cells.UNKNOWN
    return "measured" if entry.simulated.measured else "simulated"


def _reason() -> Column[Entry]:
    return words("cannot run", lambda one: one.simulated.why_not or cells.UNKNOWN, "what the schedule needs")


_DIRECTIONS = ("forward", "backward")


def context_columns(found: Sequence[Context]) -> tuple[Column[Context], ...]:
    """Return the columns of context-parallel steps."""
    exposed_help = "attention's communication that no computation hides, of the traced step"
    part_help = "transfers' exposed time over their time alone: above 100 % where they are slower beside computation"
    rows = [one.row for one in found]
    columns: tuple[Column[Context], ...] = (
        lifted(metric_column("tokens_per_second", 5), lambda one: one.row),
        figure("bytes sent", lambda one: one.sent_bytes(), cells.num_bytes, "by a rank's attention in a step", 3),
        *(_ratio(direction) for direction in _DIRECTIONS),
        figure("exposed cp", lambda one: one.exposed_seconds, cells.duration, exposed_help, 0),
        figure("exposed part", lambda one: one.exposed_part, cells.percent, part_help, 4),
        *(lifted(column, lambda one: one.row) for column in metric_columns("attention", rows)),
        lifted(metric_column("memory.activations", 6, title="activations"), lambda one: one.row),
    )
    return (
        *_identity(found, lambda one: one),
        lifted(headline("step_time"), lambda one: one.row),
        *known(columns, found),
    )


def hop_columns(found: Sequence[Hopped]) -> tuple[Column[Hopped], ...]:
    """Return the columns of attention's communications, each beside what it takes alone."""
    alone_help = "all of them, each timed with nothing beside it, on the slowest rank"
    exposed_help = "waits from when all peers had issued theirs, the rank with the most"
    part_help = "exposed over alone: above 100 % where transfers are slower beside computation"
    return (
        *_identity([one.context for one in found], lambda one: one.context),
        words("direction", lambda one: one.hop.direction, "of the step: forward or backward"),
        figure("step", lambda one: one.hop.step, cells.whole, "which step of the ring it overlaps, from 0"),
        words("what", lambda one: one.hop.what, "what moves"),
        figure("bytes", lambda one: one.hop.num_bytes, cells.num_bytes, "of one of them, on a rank", 3),
        figure("count", lambda one: one.hop.count, cells.whole, "how often a step makes it: layers x microbatches", 4),
        figure("alone", lambda one: one.hop.comm_seconds, cells.duration, alone_help),
        figure("exposed", lambda one: one.hop.exposed_seconds, cells.duration, exposed_help),
        figure("exposed part", _exposed_part, cells.percent, part_help, 1),
        figure("waited", lambda one: one.hop.wait_seconds, cells.duration, "waits, for peers that come late too", 2),
        *known(
            (
                figure(
                    "pairs max/mean",
                    _unevenness,
                    cells.formatted("{:.3g}"),
                    "pairs of ranks in this step of the ring",
                    5,
                ),
            ),
            found,
        ),
    )


def _identity(found: Sequence[Context], context_of: Callable[[T], Context]) -> tuple[Column[T], ...]:
    """Return the columns that tell steps apart; ``found`` are all steps, for their names."""
    others = differences([one.row for one in found], ("method", "ulysses", "mask", "sequence"))

    def name(item: T) -> str:
        one = context_of(item)
        return cells.visible(f"{one.method} {others[one.row.case.id]}")

    return (
        words("method", name, "how queries meet keys of other ranks, with the parameters in which steps differ"),
        words("mask", lambda item: cells.visible(context_of(item).facts.mask), "what a query sees"),
        figure("cp", lambda item: context_of(item).ranks, cells.whole, "ranks that share a sequence"),
        figure("sequence", lambda item: context_of(item).facts.sequence, cells.whole, "tokens of a whole sequence"),
    )


def _ratio(direction: str) -> Column[Context]:
    help_text = f"bytes sent {direction} over the closed form's, on the axis where they differ most"
    return figure(f"ratio {direction}", lambda one: one.bytes_ratio(direction), cells.formatted("{:.3f}"), help_text, 3)


def _exposed_part(one: Hopped) -> float | None:
    return one.hop.exposed_seconds / one.hop.comm_seconds if one.hop.comm_seconds else None


def _unevenness(one: Hopped) -> float | None:
    pairs = one.hop.pairs_by_rank
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else None


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
