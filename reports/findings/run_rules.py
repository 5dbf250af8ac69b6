"""Rules that derive findings about ranks, links, groups and operations from evidence."""

from collections.abc import Callable, Iterator

from parbench.bench.results.formatting import format_percent, format_quantity, format_seconds
from parbench.bench.results.stats import median
from parbench.reports.findings.evidence import CollectedEvidence, TimeComparison
from parbench.reports.findings.finding import MIN_SHARE, Finding

MIN_COMPUTE_RATIO = 1.1
"""A rank computes clearly longer above this ratio to the median of other ranks."""
MAX_SLOW_RATE = 0.75
"""A link or group is slow below this fraction of the median bandwidth of the others."""
MIN_AGREEMENT = 0.75
"""The fraction of repetitions that must show a slow link or group."""
MIN_TIME_RATIO = 1.2
"""An operation is slow above this ratio of its time to the reference time."""
MIN_CLIFF_RATIO = 3.0
"""A time above this multiple of its fit is reported even if measured once or if it costs little."""
HINTS = {
    "slow-link": "A NIC, cable or switch port may be degraded.",
    "slow-group": "A rank or a link of this group may be slow.",
    "off-fit": "The link may be slow or shared, or the algorithm may change at this size.",
    "slower-than-composite": "Its algorithm may not suit this size.",
}


def find_stragglers(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each rank for which other ranks wait at least 5 % of the time."""
    for straggler in evidence.stragglers:
        share = min(straggler.waited_share, 1.0)
        if share < MIN_SHARE:
            continue
        is_computing = straggler.compute_ratio >= MIN_COMPUTE_RATIO
        cause = ""
        if is_computing:
            cause = f" It computes {straggler.compute_ratio:.2f} times as long as the others."
        elif straggler.host_idle_seconds:
            idle = format_seconds(straggler.host_idle_seconds)
            cause = f" Its host probably does not keep up: it is idle for {idle} longer."
        is_slow = is_computing or straggler.observation == "finishes last"
        rank = f"rank {straggler.rank}"
        yield Finding(
            kind="slow-rank" if is_slow else "late-rank",
            subject=rank,
            message=f"{rank.capitalize()} {straggler.observation} {straggler.occasions}. "
            f"The others wait {format_seconds(straggler.waited_seconds)} ({format_percent(share)}).{cause}",
            command=straggler.command,
            time_share=share,
            evidence={"rank": straggler.rank, "seconds": straggler.waited_seconds},
        )


def find_slow_rates(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for the slowest link or group of each set of equal ones, if it is clearly slow.

    The slowest has the smallest median bandwidth over repetitions. At least 75 % of its repetitions
    must be below 75 % of the median of the other medians.
    """
    for rates in evidence.rates:
        medians = {name: median(values) for name, values in rates.by_name.items()}
        slowest = min(medians, key=lambda name: medians[name])
        other_rates = [rate for name, rate in medians.items() if name != slowest]
        if not other_rates:
            continue
        median_rate = median(other_rates)
        values = rates.by_name[slowest]
        num_slow = sum(value < MAX_SLOW_RATE * median_rate for value in values)
        if num_slow < MIN_AGREEMENT * len(values):
            continue
        rate = medians[slowest]
        scope = f" ({rates.scope})" if rates.scope else ""
        yield Finding(
            kind=rates.kind,
            subject=slowest,
            message=f"{slowest[0].upper()}{slowest[1:]} reached {format_quantity(rate, 'B/s')}. "
            f"The median of the others is {format_quantity(median_rate, 'B/s')}{scope}. {HINTS[rates.kind]}",
            command=rates.command,
            time_share=1 - rate / median_rate,
            confidence=1.0 if len(values) > 1 else 0.5,
            evidence={"bytes_per_second": rate, "median_bytes_per_second": median_rate},
        )


def find_slow_operations(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each operation that takes clearly longer than its reference time.

    The reference is the operation's fit of time over size, or another operation that includes its
    work. The lower end of the 95 % interval of the ratio must be at least 1.2, and at least 5 % of
    the time must be lost. A time of three times its fit is always reported.
    """
    for comparison in evidence.comparisons:
        low_ratio = comparison.low_ratio or 0.0
        is_slow = low_ratio >= MIN_TIME_RATIO and comparison.lost_share >= MIN_SHARE
        if not is_slow and not _is_cliff(comparison):
            continue
        yield Finding(
            kind=comparison.kind,
            subject=comparison.name,
            message=f"{comparison.name} takes {format_seconds(comparison.seconds)}, "
            f"{comparison.ratio:.2f} times as long as {comparison.reference}. "
            f"{HINTS[comparison.kind]}",
            command=comparison.command,
            time_share=comparison.lost_share,
            evidence={"seconds": comparison.seconds, "ratio": comparison.ratio},
        )


def find_rates_above_link(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each bus bandwidth that exceeds the declared link speed."""
    link = evidence.link_bytes_per_second
    for name, rate in evidence.bus_bandwidths.items():
        if link and rate > link:
            yield Finding(
                kind="above-link",
                subject=name,
                message=f"{name} reached {format_quantity(rate, 'B/s')}, "
                f"above the link of {format_quantity(link, 'B/s')}. "
                "NVLS, SHARP or a tree sends less over the link. NCCL_ALGO=Ring measures the link.",
                time_share=None,
                evidence={"bytes_per_second": rate},
            )


def _is_cliff(comparison: TimeComparison) -> bool:
    """Return True if an operation takes at least three times as long as its fit of time over size.

    The lower end of the ratio's 95 % interval counts. Without an interval, which requires three
    repetitions, the ratio itself counts.
    """
    ratio = comparison.ratio if comparison.low_ratio is None else comparison.low_ratio
    return comparison.kind == "off-fit" and ratio >= MIN_CLIFF_RATIO


RULES: tuple[Callable[[CollectedEvidence], Iterator[Finding]], ...] = (
    find_stragglers,
    find_slow_rates,
    find_slow_operations,
    find_rates_above_link,
)
"""The rules that ``apply_rules`` applies to all evidence of a run or of traces."""
