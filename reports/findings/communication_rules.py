"""Rules about the speed of links, groups of ranks and operations."""

from collections.abc import Callable, Iterator

from parbench.bench.results.formatting import format_number, format_quantity, format_seconds
from parbench.bench.results.stats import median
from parbench.reports.findings.evidence import Evidence, Groups, Link, Links, TimeComparison
from parbench.reports.findings.finding import MIN_SHARE, Finding, get_confidence

MAX_SLOW_LINK_RATE = 0.7
MAX_SLOW_GROUP_RATE = 0.9
MIN_OFF_FIT_RATIO = 1.3
MIN_COMPOSITE_RATIO = 1.1
MIN_AGREEMENT = 0.75
"""The share of repetitions that must show an effect."""

RunRule = Callable[[Evidence], Iterator[Finding]]


def find_slow_links(evidence: Evidence) -> Iterator[Finding]:
    """A link, or all links of a rank, are slower than others of the same distance."""
    for links in evidence.links:
        slow = _find_slow_rank(links) or _find_worst_link(links)
        if slow is None:
            continue
        name, bytes_per_second, usual = slow
        num_observations = max(len(rates) for rates in links.rates_by_repetition.values())
        yield _build_rate_finding(
            "slow-link",
            name,
            bytes_per_second,
            usual,
            where=f" ({links.distance})" if links.distance else "",
            cause="A NIC, cable or switch port may be degraded.",
            command=links.command,
            num_observations=num_observations,
        )


def find_slow_groups(evidence: Evidence) -> Iterator[Finding]:
    """A group of ranks is slower than other groups of its kind."""
    for groups in evidence.groups:
        slowest = min(groups.rates, key=lambda name: groups.rates[name])
        usual = _compute_median_of_others(groups, slowest)
        if groups.rates[slowest] >= MAX_SLOW_GROUP_RATE * usual:
            continue
        yield _build_rate_finding(
            "slow-group",
            f"group {slowest}",
            groups.rates[slowest],
            usual,
            where=f" ({groups.operation})",
            cause="A link or a rank of this group may be slow.",
            command=groups.command,
            num_observations=groups.num_observations,
        )


def find_off_fit(evidence: Evidence) -> Iterator[Finding]:
    """An operation takes longer than its latency-bandwidth fit predicts."""
    for comparison in evidence.fits:
        ratio = comparison.seconds / comparison.reference_seconds
        above = sum(ratio > MIN_OFF_FIT_RATIO for ratio in comparison.ratios)
        agrees = above >= MIN_AGREEMENT * len(comparison.ratios)
        if ratio > MIN_OFF_FIT_RATIO and agrees:
            yield from _build_time_finding(
                "off-fit",
                comparison,
                f"{comparison.name} takes {format_seconds(comparison.seconds)}, which is "
                f"{format_number(ratio)} times the fit ({comparison.reference}). "
                "The link may be slow or shared, or the algorithm may change at this size.",
            )


def find_slower_than_composite(evidence: Evidence) -> Iterator[Finding]:
    """An operation takes longer than one that includes its work."""
    for comparison in evidence.composites:
        if (comparison.low_ratio or 0.0) > MIN_COMPOSITE_RATIO:
            yield from _build_time_finding(
                "slower-than-composite",
                comparison,
                f"{comparison.name} takes {format_seconds(comparison.seconds)}, but "
                f"{comparison.reference} takes {format_seconds(comparison.reference_seconds)} "
                "and includes its work. Its algorithm may not suit this size.",
            )


def find_slower_under_load(evidence: Evidence) -> Iterator[Finding]:
    """An operation takes longer during a background load."""
    for comparison in evidence.background_loads:
        ratio = comparison.seconds / comparison.reference_seconds
        if comparison.low_ratio is not None and comparison.low_ratio > 1:
            yield from _build_time_finding(
                "slower-under-load",
                comparison,
                f"{comparison.name} takes {ratio:.2f} times as long during "
                f"{comparison.reference}. Both probably share cores, links or memory.",
            )


def find_busy_machine(evidence: Evidence) -> Iterator[Finding]:
    """Other processes ran during the measurement."""
    load = evidence.host_disturbance
    if load is None:
        return
    is_noisy = load.variation is not None
    if not is_noisy and 2 * load.num_disturbed < load.num_repetitions:
        return
    effect = "Times probably vary for this reason." if is_noisy else "Times may vary more."
    description = load.description
    yield Finding(
        kind="busy-machine",
        subject="host",
        message=f"{description[0].upper()}{description[1:]}. {effect}",
        command="parbench doctor",
        amount=f"{load.num_disturbed} of {load.num_repetitions} repetitions",
        time_share=None,
        evidence={"variation": load.variation, "num_disturbed": load.num_disturbed},
    )


RULES: tuple[RunRule, ...] = (
    find_slow_links,
    find_slow_groups,
    find_off_fit,
    find_slower_than_composite,
    find_slower_under_load,
    find_busy_machine,
)


def _find_slow_rank(links: Links) -> tuple[str, float, float] | None:
    """Return a rank whose links are all slow, their median rate, and that of the other links."""
    if len(links.ranks) < 3:
        return None
    for rank in links.ranks:
        own = {link: rate for link, rate in links.rates.items() if rank in link}
        others = [rate for link, rate in links.rates.items() if rank not in link]
        if not others:
            continue
        usual = median(others)
        if all(_is_slow(links, link, usual) for link in own):
            return f"links of rank {rank}", median(list(own.values())), usual
    return None


def _find_worst_link(links: Links) -> tuple[str, float, float] | None:
    """Return the slowest link, its rate, and the median of all links. None if none is slow."""
    usual = median(list(links.rates.values()))
    slow = [link for link in links.rates if _is_slow(links, link, usual)]
    if not slow:
        return None
    source, target = worst = min(slow, key=lambda link: links.rates[link])
    more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return f"link from rank {source} to {target}{more}", links.rates[worst], usual


def _is_slow(links: Links, link: Link, usual: float) -> bool:
    """Return whether a link is slow over all repetitions and in most of them."""
    threshold = MAX_SLOW_LINK_RATE * usual
    rates = links.rates_by_repetition[link]
    num_slow = sum(rate < threshold for rate in rates)
    return links.rates[link] < threshold and num_slow >= MIN_AGREEMENT * len(rates)


def _compute_median_of_others(groups: Groups, excluded: str) -> float:
    rates = [rate for name, rate in groups.rates.items() if name != excluded]
    return median(rates) if rates else 0.0


def _build_rate_finding(
    kind: str,
    name: str,
    rate: float,
    usual: float,
    *,
    where: str,
    cause: str,
    command: str,
    num_observations: int,
) -> Finding:
    slow_text = format_quantity(rate, "B/s")
    return Finding(
        kind=kind,
        subject=name,
        message=f"The {name} reached {slow_text}. "
        f"The median of the others is {format_quantity(usual, 'B/s')}{where}. {cause}",
        command=command,
        amount=slow_text,
        time_share=1 - rate / usual,
        confidence=get_confidence(num_observations),
        evidence={"bytes_per_second": rate, "median_bytes_per_second": usual},
    )


def _build_time_finding(kind: str, comparison: TimeComparison, message: str) -> Iterator[Finding]:
    """Yield the finding if enough of the time is lost."""
    share = comparison.lost_seconds / comparison.total_seconds
    if share < MIN_SHARE:
        return
    ratio = comparison.seconds / comparison.reference_seconds
    yield Finding(
        kind=kind,
        subject=comparison.name,
        message=message,
        command=comparison.command,
        amount=f"{format_number(ratio)} times",
        time_share=share,
        confidence=get_confidence(len(comparison.ratios)),
        evidence={
            "case": comparison.id,
            "seconds": comparison.seconds,
            "reference_seconds": comparison.reference_seconds,
        },
    )
