"""What stands out of a run though nothing failed: who is slow, late, noisy, or not as theory expects. Pure."""

from collections.abc import Iterable, Sequence

from bench.results.stats import median
from reports import cells
from reports.breakdown import worst_ratio
from reports.communication_section import late_label
from reports.contrasts import Pairs, contrasts
from reports.findings import Findings
from reports.group_table import Grouped, grouped
from reports.labels import short_labels
from reports.nodes.rank_hosts import Nodes
from reports.summary import Row

_MOST_NAMED = 6
_SLOW_LINK, _SLOW_GROUP = 0.7, 0.9
_LATE_SHARE, _LATE_OF_TIME = 0.5, 0.1
_OFF_RATIO = 0.01


def doubts(found: Findings) -> tuple[str, ...]:
    """Return a sentence for each kind of thing that a reader should look at first."""
    name = _namer(found)
    sentences = (
        _named("Very noisy, the interquartile range over 40 % of the median", _very_noisy(found.shown, name)),
        *(sentence for matrix in found.matrices for sentence in _slow_links(matrix, found.nodes)),
        _named("Slower than the other groups by more than a tenth", _slow_groups(found)),
        _named("Slower beside others, by more than the interval", _slowed(found)),
        _named("One rank comes last in most iterations, for a tenth of the time or more", _late(found.shown, name)),
        _named("Sizes that the fit does not explain", _off_curve(found)),
        _named("Bytes sent are not those expected", _off_bytes(found.steps, name)),
    )
    return tuple(sentence for sentence in sentences if sentence)


def _namer(found: Findings) -> dict[str, str]:
    """Return what to call each row, by case id."""
    return {
        **{row.case.id: late_label(row) for row in found.shown if row.is_communication},
        **short_labels(found.steps),
    }


def _named(what: str, names: Iterable[str]) -> str:
    told = list(names)
    more = f" and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return f"{what}: {'; '.join(told[:_MOST_NAMED])}{more}." if told else ""


def _very_noisy(rows: Sequence[Row], name: dict[str, str]) -> list[str]:
    return [name[row.case.id] for row in rows if row.grade == "very noisy"]


def _slow_links(matrix: Pairs, nodes: Nodes | None) -> Iterable[str]:
    """Hold each link against those that are as far: that nodes lie farther apart than cores is no doubt."""
    by_distance: dict[str, dict[tuple[int, int], float]] = {}
    for pair in matrix.rows:
        distance = nodes.distance(*pair) if nodes and max(pair) < len(nodes.hosts) else ""
        if rate := matrix.rate(*pair):
            by_distance.setdefault(distance, {})[pair] = rate
    for distance, rates in by_distance.items():
        middle = median(list(rates.values()))
        slow = sorted((rate, pair) for pair, rate in rates.items() if rate < _SLOW_LINK * middle)
        told = (f"rank {a} to {b} at {cells.quantity(rate, 'B/s')}" for rate, (a, b) in slow)
        where = f" ({distance})" if distance else ""
        yield _named(f"Links{where} below 70 % of the median, {cells.quantity(middle, 'B/s')}", told)


def _slow_groups(found: Findings) -> Iterable[str]:
    """Hold each group against those of its kind: one across nodes has other links than one within."""
    for one in grouped(found.communication):
        for kind in dict.fromkeys(row.case.params["group"] for row in one.rows.values()):
            rows = {name: row for name, row in one.rows.items() if row.case.params["group"] == kind}
            alike = Grouped(first=one.first, rows=rows)
            rates = [rate for name, row in rows.items() if name != alike.slowest and (rate := row.value("busbw"))]
            slow = rows[alike.slowest].value("busbw") if alike.slowest else None
            if slow is not None and rates and slow < _SLOW_GROUP * median(rates):
                yield f"{alike.slowest}: {late_label(one.first)}"


def _slowed(found: Findings) -> Iterable[str]:
    for _, prefix, rows in contrasts(found.shown):
        for one in rows:
            for load, factor in one.factors.items():
                if factor.low is not None and factor.low > 1:
                    yield f"{late_label(one.base)} {prefix}{load} x {cells.significant(factor.value)}"


def _late(rows: Sequence[Row], name: dict[str, str]) -> Iterable[str]:
    for row in rows:
        arrival = next((record.arrival for record in row.measured if record.arrival), None)
        skew, seconds = row.value("skew"), row.value(row.headline)
        if arrival is None or arrival.late_rank is None or arrival.share is None or not skew or not seconds:
            continue
        if arrival.share > _LATE_SHARE and skew > _LATE_OF_TIME * seconds:
            yield f"rank {arrival.late_rank}, by {cells.duration(skew)}: {name[row.case.id]}"


def _off_curve(found: Findings) -> list[str]:
    return [
        f"{late_label(curve.rows[0])} at {cells.size(size)}, {100 * error:+.0f} %"
        for curve in found.curves
        for size, error in curve.fit.off_curve
    ]


def _off_bytes(steps: Sequence[Row], name: dict[str, str]) -> list[str]:
    worst = ((row, worst_ratio(row)) for row in steps)
    return [
        f"{name[row.case.id]} on {ratio[0]} x {ratio[1]:.3f}"
        for row, ratio in worst
        if ratio is not None and abs(ratio[1] - 1) > _OFF_RATIO
    ]
