"""The report on expert parallelism: load, drops and bytes of each step, and tokens per expert."""

from collections.abc import Iterator, Sequence
from typing import Any

from parbench.bench.results.formatting import UNKNOWN, format_count, make_formatter, to_single_line
from parbench.reports.analysis.analysis import Analysis
from parbench.reports.analysis.experts import Mixture, Share, distinct, read_mixture, shares
from parbench.reports.analysis.labels import differences, short_labels
from parbench.reports.analysis.summary import unreadable
from parbench.reports.report import Column, Section, Table, known, number, words
from parbench.reports.sections.row_columns import headline, metric_column, metric_columns

_MOST_LISTED = 16


def experts_section(found: Analysis) -> Section | None:
    unread = unreadable(found.steps, read_mixture)
    if not found.mixtures and not unread:
        return None
    own: Table[Mixture] = Table(
        id="experts-table",
        title="Expert parallelism",
        caption="loads, drops, bytes and what imbalance costs; scopes do not compare with each other",
        columns=mixture_columns(found.mixtures),
        rows=found.mixtures,
    )
    tables: tuple[Table[Any], ...] = (own, *_loads(found.mixtures))
    return Section(
        id="experts",
        title="Expert parallelism",
        tables=tables if found.mixtures else (),
        notes=unread,
    )


def mixture_columns(found: Sequence[Mixture]) -> tuple[Column[Mixture], ...]:
    rows = [one.row for one in found]
    others = differences(rows, ("routing", "capacity", "ep", "variant"))
    of_ep = known((metric_column("bytes_ratio.ep"), metric_column("exposed_comm.ep")), rows)
    return (
        words(
            "scope",
            lambda one: to_single_line(f"{one.scope} {others[one.row.case.id]}"),
            "what is timed",
        ),
        words(
            "routing",
            lambda one: to_single_line(one.routing) or UNKNOWN,
            "how experts are chosen",
        ),
        number(
            "capacity",
            lambda one: one.capacity,
            _capacity,
            "factor above which tokens drop; dropless has none",
        ),
        number("EP", lambda one: one.ep, format_count, "ranks that experts are dealt out to"),
        words(
            "variant",
            lambda one: to_single_line(one.variant) or UNKNOWN,
            "how tokens get there and back",
        ),
        *(
            column.of(lambda one: one.row)
            for column in (headline("step_time", rows), *metric_columns("experts", rows), *of_ep)
        ),
    )


def _capacity(value: float | None) -> str:
    return "dropless" if value is None else f"{value:g}"


def _loads(mixtures: Sequence[Mixture]) -> Iterator[Table[Share]]:
    if lines := shares(distinct(mixtures)):
        yield Table(
            id="experts-load",
            title="Tokens per expert",
            caption="tokens by rank and expert in the step explained, each routing once",
            columns=share_columns(lines),
            rows=lines,
        )


def share_columns(found: Sequence[Share]) -> tuple[Column[Share], ...]:
    def layer(one: Share) -> str:
        is_one = len(one.mixture.layers) == len(one.mixture.facts.expert_load)
        return str(one.layer) if is_one else "all"

    def experts(one: Share) -> str:
        last = one.first_expert + len(one.chosen) - 1
        return str(last) if last == one.first_expert else f"{one.first_expert} to {last}"

    def by_expert(one: Share) -> str:
        if len(one.chosen) > _MOST_LISTED:
            return f"{min(one.chosen)} to {max(one.chosen)}"
        return " ".join(map(str, one.chosen))

    labels = short_labels(
        list({one.mixture.row.case.id: one.mixture.row for one in found}.values())
    )
    layers: Column[Share] = words("layer", layer, "the layer, from 0, or all where all are alike")
    return (
        words(
            "step",
            lambda one: labels[one.mixture.row.case.id],
            "the step, with what tells steps apart",
        ),
        *([layers] if any(len(one.mixture.facts.expert_load) > 1 for one in found) else []),
        number(
            "capacity",
            lambda one: one.mixture.capacity,
            _capacity,
            "factor above which tokens drop",
        ),
        number(
            "rank",
            lambda one: one.rank,
            format_count,
            "the rank among those that experts are dealt out to",
        ),
        words("experts", experts, "the rank's experts"),
        number(
            "chosen",
            lambda one: sum(one.chosen),
            format_count,
            "tokens that chose one of them, of all sources",
        ),
        number(
            "of mean",
            lambda one: one.of_mean,
            make_formatter("{:.2f}"),
            "the same over an even share",
        ),
        number(
            "kept",
            lambda one: one.kept,
            format_count,
            "pairs that the rank gets, dropped ones left out",
        ),
        words("by expert", by_expert, "tokens that chose each, or the least and the most of them"),
    )
