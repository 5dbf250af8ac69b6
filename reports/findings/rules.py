"""Rules that derive findings (problems with likely causes) from the facts of a run or of traces.

Evidence is the facts in the same form for runs and traces. A rule is a function that yields the
findings of one kind. To add a rule, write it here and add it to ``RUN_RULES``. The rules on one
training step are in ``step_rules.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from parbench.bench.results.formatting import format_percent, format_quantity, format_seconds
from parbench.bench.results.stats import median
from parbench.bench.text import name_first
from parbench.reports.findings.finding import MIN_SHARE, Finding
from parbench.reports.findings.step_rules import STEP_RULES, StepEvidence
from parbench.reports.stats import estimate_paired_effect

MAX_FINDINGS = 6
"""The largest number of findings in a report."""
MAX_NAMED_SUBJECTS = 3
"""A finding also names at most this number of steps, links or ranks with the same problem."""
MAX_SLOW_RATE = 0.75
"""A link or group is slow below this fraction of the median bandwidth of the others."""
MIN_AGREEMENT = 0.75
"""A link or group is reported if it is slow in at least this fraction of repetitions."""
MIN_TIME_RATIO = 1.2
"""An operation is slow above this ratio of its time to the time that its fit predicts."""
MIN_SINGLE_RATIO = 2.0
"""The ratio above which an operation is slow if its times are too few for an interval."""


@dataclass(frozen=True, kw_only=True)
class StragglerEvidence:
    """A rank for which other ranks wait (straggler), with the time that they wait."""

    rank: int
    """The global rank."""
    observation: str
    """The reason for which the rank counts as slow: ``arrives last in 3 of 3 repetitions``."""
    waited_seconds: float
    """The seconds that the other ranks wait for the rank in each operation or step."""
    waited_share: float
    """``waited_seconds`` as a fraction of the duration of the operation or step."""
    command: str = ""
    """The command that examines the host of the rank, empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A set of bus bandwidths that are equal if no link or process group is slow.

    They are those of links at one network distance, or of groups that ran one operation.
    """

    kind: Literal["slow-link", "slow-group"]
    """The kind of the finding that is reported if one of the bandwidths is low."""
    scope: str
    """The network distance of the links, or the operation of the groups with its size, as text."""
    by_name: Mapping[str, Sequence[float]]
    """The bandwidths in B/s, one for each repetition, keyed by the name of the link or group.

    A name may stand for all links of a rank: ``links of rank 3``.
    """
    command: str
    """The command that measures the bandwidths again."""


@dataclass(frozen=True, kw_only=True)
class FitComparison:
    """The time of an operation, compared with the fit of its times over size."""

    name: str
    """The operation with its size and mode."""
    seconds: float
    """The mean time of the operation in seconds, over repetitions of a run or calls of a trace."""
    ratio: float
    """The measured time over the fitted time, the geometric mean over repetitions or calls."""
    low_ratio: float | None
    """The lower end of the 95 % interval of ``ratio``, None for fewer than three times."""
    lost_share: float
    """The fraction of a total time that is lost because the operation exceeds its fitted time.

    The total is the time of a traced step. In a run it is the sum of the operation's times over all
    sizes.
    """
    command: str
    """The command that measures the operation again."""


@dataclass(frozen=True, kw_only=True)
class CollectedEvidence:
    """All evidence from a run, or from the traces of a job."""

    steps: Sequence[StepEvidence] = ()
    """The training steps."""
    stragglers: Sequence[StragglerEvidence] = ()
    """The ranks for which other ranks wait."""
    rates: Sequence[Rates] = ()
    """Sets of bandwidths of links or groups. The bandwidths of one set are compared."""
    comparisons: Sequence[FitComparison] = ()
    """The times of operations that are compared with their fits."""


def compare_with_fit(
    name: str,
    fitted_seconds: Sequence[float],
    seconds: Sequence[float],
    *,
    total_seconds: float,
    affected_seconds: float,
    command: str,
) -> Iterator[FitComparison]:
    """Yield the comparison of the times of an operation with the fit of its times over size.

    Args:
        name: the operation with its size and mode.
        fitted_seconds: the time by the fit for each repetition or call.
        seconds: the measured time of each repetition or call.
        total_seconds: the time of which ``lost_share`` is a fraction.
        affected_seconds: the part of ``total_seconds`` that the operation takes, and that would
            shrink if the operation took its fitted time.
        command: the command that measures the operation again.
    """
    effect = estimate_paired_effect(dict(enumerate(fitted_seconds)), dict(enumerate(seconds)))
    if effect is not None:
        yield FitComparison(
            name=name,
            seconds=fmean(seconds),
            ratio=effect.ratio,
            low_ratio=None if effect.low is None else 1 + effect.low,
            lost_share=affected_seconds * (1 - 1 / effect.ratio) / total_seconds,
            command=command,
        )


def apply_rules(evidence: CollectedEvidence) -> tuple[Finding, ...]:
    """Return the findings (problems with likely causes) from the facts of a run or of traces.

    There is one finding for each kind of problem: the one that costs most time. Its message also
    names the other steps, links or ranks with this problem. At most six findings are returned, the
    ones that cost most time first. Findings whose cost is not a time come last.
    """
    findings = [finding for rule in RUN_RULES for finding in rule(evidence)]
    for step in evidence.steps:
        findings += [finding for rule in STEP_RULES for finding in rule(step)]
    by_kind: dict[str, dict[str, Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.time_share or 0.0, reverse=True):
        by_kind.setdefault(finding.kind, {}).setdefault(finding.subject, finding)
    joined = []
    for by_subject in by_kind.values():
        worst, *others = by_subject.values()
        if others:
            names = name_first([finding.subject for finding in others], MAX_NAMED_SUBJECTS)
            worst = replace(worst, message=f"{worst.message} Also: {', '.join(names)}.")
        joined.append(worst)
    return tuple(joined[:MAX_FINDINGS])


def find_slow_ranks(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each rank for which others wait at least 5 % of an operation or step."""
    for straggler in evidence.stragglers:
        share = min(straggler.waited_share, 1.0)
        if share >= MIN_SHARE:
            yield Finding(
                kind="slow-rank",
                subject=f"rank {straggler.rank}",
                message=f"Rank {straggler.rank} {straggler.observation}. The others wait "
                f"{format_seconds(straggler.waited_seconds)} ({format_percent(share)}).",
                command=straggler.command,
                time_share=share,
            )


def find_slow_rates(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for the slowest link or process group of each set, if it is clearly slow.

    A set has links or groups whose bandwidths are equal if none is slow. The slowest one has the
    smallest median bandwidth over repetitions. It is clearly slow if at least 75 % of its
    repetitions are below 75 % of the median of the other links' or groups' medians.
    """
    for rates in evidence.rates:
        medians = {name: median(values) for name, values in rates.by_name.items()}
        slowest = min(medians, key=lambda name: medians[name])
        rate = medians.pop(slowest)
        if not medians:
            continue
        median_rate = median(list(medians.values()))
        values = rates.by_name[slowest]
        num_slow = sum(value < MAX_SLOW_RATE * median_rate for value in values)
        if num_slow >= MIN_AGREEMENT * len(values):
            yield Finding(
                kind=rates.kind,
                subject=slowest,
                message=f"{slowest[0].upper()}{slowest[1:]} reached {format_quantity(rate, 'B/s')} "
                f"({rates.scope}). The median of the others is "
                f"{format_quantity(median_rate, 'B/s')}. A NIC, cable or rank may be slow.",
                command=rates.command,
                time_share=1 - rate / median_rate,
            )


def find_slow_operations(evidence: CollectedEvidence) -> Iterator[Finding]:
    """Yield a finding for each operation that takes clearly longer than its fit over size predicts.

    The ratio of measured to fitted time must be at least 1.2 at the lower end of its 95 % interval,
    or at least 2 without an interval. The excess must also cost at least 5 % of the total time
    (``FitComparison.lost_share``).
    """
    for comparison in evidence.comparisons:
        low_ratio, caveat = comparison.low_ratio, ""
        is_slow = low_ratio is not None and low_ratio >= MIN_TIME_RATIO
        if low_ratio is None:
            is_slow = comparison.ratio >= MIN_SINGLE_RATIO
            caveat = " (fewer than three repetitions)"
        if is_slow and comparison.lost_share >= MIN_SHARE:
            yield Finding(
                kind="off-fit",
                subject=comparison.name,
                message=f"{comparison.name} takes {format_seconds(comparison.seconds)}, "
                f"{comparison.ratio:.2f} times as long as its fit{caveat}. The link may be slow or shared, "
                "or the algorithm may change at this size.",
                command=comparison.command,
                time_share=comparison.lost_share,
            )


RUN_RULES: tuple[Callable[[CollectedEvidence], Iterator[Finding]], ...] = (
    find_slow_ranks,
    find_slow_rates,
    find_slow_operations,
)
"""The rules that ``apply_rules`` applies to all evidence of a run or of traces."""
