"""The sentences and numbers in the report on a comparison of the runs BASE and NEW."""

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import median

from parbench.bench.results.formatting import UNKNOWN, format_number, format_percent
from parbench.bench.results.runs import Run
from parbench.bench.text import format_duration, name_first, pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.labels import label_cases
from parbench.reports.analysis.verdicts import describe_completion, describe_emulations
from parbench.reports.compare.ab import MAX_PAIRS, MIN_REPETITION_SECONDS, TEST_POINTS
from parbench.reports.compare.compare import RunComparison, SeriesComparison
from parbench.reports.compare.thresholds import describe_thresholds
from parbench.reports.compare.verdicts import MEANINGS, Verdict, count_verdicts, format_verdicts
from parbench.reports.limits import describe_limits
from parbench.reports.stats import (
    Effect,
    compute_detectable_effect,
    compute_required_repetitions,
)

MAX_NAMED_SERIES = 3
"""The number of slower series that a sentence names."""


def format_effect(effect: Effect | None) -> str:
    """Return a change of the time with its 95 % interval: ``+5.1 % [+3.9, +6.3]``.

    Without an interval, only the change. ``UNKNOWN`` stands for None.
    """
    if effect is None:
        return UNKNOWN
    if effect.low is None or effect.high is None:
        return f"{_format_signed(effect.change)} %"
    interval = f"[{_format_signed(effect.low)}, {_format_signed(effect.high)}]"
    return f"{_format_signed(effect.change)} % {interval}"


def _format_signed(fraction: float) -> str:
    """Return a fraction in percent with its sign, without the percent sign: ``+5.1`` for 0.051."""
    sign = "+" if fraction > 0 else ""
    return f"{sign}{format_number(100 * fraction)}"


def label_series(series: Sequence[SeriesComparison]) -> list[str]:
    """Return a label for each compared case, in order, with the parameters that distinguish it."""
    labels = label_cases([member.any_result for member in series])
    return [labels[member.case.id] for member in series]


def summarize_comparison(comparison: RunComparison) -> list[str]:
    """Return the sentences of the summary: limits, counts, kernels, times, and the overall change.

    A sentence without content is left out.
    """
    sentences = [
        *describe_limits(comparison.limits),
        describe_counts(comparison),
        describe_kernels(comparison),
        describe_times(comparison),
        describe_overall(comparison),
    ]
    return [sentence for sentence in sentences if sentence]


def describe_counts(comparison: RunComparison) -> str:
    """Return a sentence about changed counts of calls, bytes and memory.

    Empty if no count was compared.
    """
    counted = comparison.counted_series
    if not counted:
        return ""
    num_compared = sum(series.counts.num_compared for series in counted)
    total = f"{num_compared} in {len(counted)} series"
    changed = [
        (series, change)
        for series, change in comparison.count_changes
        if change.verdict == Verdict.COUNT_CHANGED
    ]
    varying = [(series, change) for series in counted for change in series.counts.varying]
    if varying and not changed:
        series, change = varying[0]
        return (
            f"Counts: {len(varying)} not compared: {series.case.short_name}: {change.message}. "
            f"No other count changed ({total})."
        )
    if not changed:
        return f"Counts: none of {total} changed."
    num_intended = sum(change.is_intended for _, change in changed)
    intended_suffix = f" ({num_intended} intended)" if num_intended else ""
    named = name_first(
        [f"{series.case.short_name}: {change.message}" for series, change in changed], 1
    )
    return f"Counts: {len(changed)} of {total} changed{intended_suffix}: {', '.join(named)}."


def describe_kernels(comparison: RunComparison) -> str:
    """Return a sentence about the cases in which NCCL launches other kernels, empty without any.

    Another kernel may be the cause of a changed time.
    """
    changed = [series for series in comparison.series if series.kernel_change]
    if not changed:
        return ""
    named = [
        f"{label}: {series.kernel_change}"
        for label, series in zip(label_series(changed), changed, strict=True)
    ]
    return (
        f"Kernels: NCCL launches others in {len(changed)} series, which may explain their times: "
        f"{', '.join(name_first(named, 1))}."
    )


def describe_times(comparison: RunComparison) -> str:
    """Return a sentence about the cases that became slower, the slowest first.

    If none became slower, the sentence states this. If no time was judged, it has the number of
    cases with each verdict.
    """
    if not comparison.num_judged:
        verdicts = count_verdicts(series.verdict for series in comparison.series)
        what = "Times were not checked" if comparison.counted_series else "Nothing was checked"
        return f"{what}: {format_verdicts(verdicts)}."
    labels = label_series(comparison.series)
    slower = [
        (label, series)
        for label, series in zip(labels, comparison.series, strict=True)
        if series.verdict == Verdict.SLOWER
    ]
    judged = f"{comparison.num_judged} series"
    if not slower:
        return f"Times: none of {judged} became significantly slower."
    slower.sort(key=lambda pair: -(pair[1].effect.change if pair[1].effect else 0.0))
    named = [f"{label} {format_effect(series.effect)}" for label, series in slower]
    text = ", ".join(name_first(named, MAX_NAMED_SERIES))
    return f"Times: {len(slower)} of {judged} became slower: {text}."


def describe_overall(comparison: RunComparison) -> str:
    """Return a sentence about the median change of the time over cases, empty for a single case."""
    overall = comparison.overall
    if overall is None:
        return ""
    sentence = (
        f"Overall: {overall.verdict}, {format_effect(overall.effect)} "
        f"for the median of {comparison.num_judged} series"
    )
    is_alone = overall.verdict not in comparison.verdicts
    if is_alone and overall.verdict in (Verdict.SLOWER, Verdict.FASTER):
        sentence += ", although no single series is significant on its own"
    return f"{sentence}."


def describe_runs(comparison: RunComparison) -> list[str]:
    """Return a line about BASE and one about NEW: folder, host, start and repetitions.

    A line follows for each of them whose nodes or links were emulated.
    """
    lines = []
    emulated = []
    for name, run in (("BASE", comparison.base.run), ("NEW", comparison.new.run)):
        repetitions = _describe_repetitions(run)
        info = run.info
        lines.append(f"{name}: {run.path}, host {info.host}, started {info.started}, {repetitions}")
        emulated += [f"{name} is {note}" for note in describe_emulations(run)]
    return lines + emulated


def _describe_repetitions(run: Run) -> str:
    """Return the number of planned repetitions of a run: ``5 repetitions``.

    If fewer were measured, their number comes first: ``3 of 5 repetitions``.
    """
    planned = pluralize(run.info.plan.repetitions, "repetition")
    measured = len({record.repetition for record in run.records if record.status == "ok"})
    return planned if measured >= run.info.plan.repetitions else f"{measured} of {planned}"


def explain_comparison(comparison: RunComparison) -> list[str]:
    """Return the sentences below the tables: verdicts, method, notes, and recommended commands."""
    return [
        *(f"{verdict}: {MEANINGS[verdict]}" for verdict in comparison.verdicts),
        *_describe_method(comparison),
        *describe_thresholds(series.threshold for series in comparison.series),
        *comparison.notes,
        *_advise_repetitions(comparison),
        *_suggest_actions(comparison),
    ]


def _describe_method(comparison: RunComparison) -> list[str]:
    """Return sentences about the statistical test, the threshold and drift of the machine.

    Empty if no time was judged.
    """
    if not comparison.num_judged:
        return []
    rule = comparison.rule
    if comparison.rule.is_paired:
        method = (
            "Change: geometric mean of the time ratios of paired repetitions, "
            "with 95 % confidence interval (t-test on log ratios)."
        )
    else:
        method = (
            "Change: ratio of the geometric means over repetitions, "
            "with 95 % confidence interval (Welch's t-test on logarithms)."
        )
    is_measured = any(series.threshold for series in comparison.series)
    measured = ", or the higher value that parbench aa measured" if is_measured else ""
    return [
        method,
        f"Threshold: {format_percent(rule.min_effect)}{measured}. "
        f"The false discovery rate over series is {format_percent(rule.level)} "
        "(Benjamini-Hochberg).",
        *_describe_drift(comparison),
    ]


def _describe_drift(comparison: RunComparison) -> list[str]:
    """Return a sentence about the effect of a drift of the machine on the measured change.

    Empty if both runs started at the same time.
    """
    if comparison.rule.is_paired:
        return ["Repetitions were interleaved (ABBA), so linear machine drift cancels."]
    base_start, new_start = (
        datetime.fromisoformat(data.run.info.started) for data in (comparison.base, comparison.new)
    )
    seconds = (new_start - base_start).total_seconds()
    if not seconds:
        return []
    direction = "after" if seconds > 0 else "before"
    return [
        f"NEW started {format_duration(abs(seconds))} {direction} BASE. "
        "Machine drift in that time is included in the change."
    ]


def _advise_repetitions(comparison: RunComparison) -> list[str]:
    """Return a sentence with the repetitions that would decide half of the UNCONFIRMED cases.

    It also has the command that measures them. Empty if no case is UNCONFIRMED because of noise.
    """
    noises = [
        series.effect.noise
        for series in comparison.series
        if series.verdict == Verdict.UNCONFIRMED
        and series.effect is not None
        and series.effect.noise is not None
        and not series.counts.varying
    ]
    min_effect = comparison.rule.min_effect
    if not noises or not min_effect:
        return []
    noise = median(noises)
    required = compute_required_repetitions(noise, min_effect)
    count = f"about {max(TEST_POINTS[0], required)}" if required else "more than 1000"
    series = "half of the UNCONFIRMED series" if len(noises) > 1 else "the UNCONFIRMED series"
    advice = f"Deciding {series} needs {count} repetitions per side"
    num_pairs = min(max(TEST_POINTS[0], required or MAX_PAIRS), MAX_PAIRS)
    options = f"--repetitions {num_pairs}"
    if required is None or required > MAX_PAIRS:
        error = math.log1p(noise) * math.sqrt(2 / MAX_PAIRS)
        detectable = math.ceil(100 * compute_detectable_effect(error, MAX_PAIRS - 1))
        advice += f". With at most {MAX_PAIRS}, changes of {detectable} % can be detected"
        options = f"--min-effect {detectable}% {options}"
    plan = comparison.new.plan
    seconds = max(MIN_REPETITION_SECONDS, plan.budget_seconds / plan.repetitions)
    minutes = math.ceil(2 * num_pairs * seconds / 60)
    return [f"{advice}: use parbench ab with {options} --budget {minutes}m."]


def _advise_missing_repetitions(comparison: RunComparison) -> list[str]:
    """Return advice for cases with the verdict TOO FEW RUNS: a way to get enough repetitions.

    The ways are to import more logs, to finish incomplete runs, or to measure again.
    """
    count = comparison.rule.min_repetitions
    if comparison.new.plan.is_imported:
        return [f"Import {count} logs per side to a folder each: parbench import LOG... --out NEW"]
    undecided = [series for series in comparison.series if series.verdict == Verdict.TOO_FEW_RUNS]
    base_results = [series.base for series in undecided]
    new_results = [series.new for series in undecided]
    advice = [
        *_advise_completion("BASE", comparison.base.run, base_results, count),
        *_advise_completion("NEW", comparison.new.run, new_results, count),
    ]
    return advice or [f"Measure more repetitions: parbench run --repetitions {count}"]


def _advise_completion(
    name: str, run: Run, results: Sequence[CaseResult | None], count: int
) -> list[str]:
    """Return advice for a run whose budget ended before it made enough repetitions.

    Empty if the plan of the run does not have enough repetitions either.

    Args:
        name: ``BASE`` or ``NEW``.
        run: the run.
        results: its results of the cases with the verdict TOO FEW RUNS, None where it has none.
        count: the number of required repetitions.
    """
    incomplete = [
        result
        for result in results
        if result and result.status == "ok" and result.repetitions < count <= result.planned
    ]
    if not incomplete:
        return []
    fewest = min(incomplete, key=lambda result: result.repetitions)
    budget = format_duration(run.info.plan.budget_seconds)
    text = f"{name} ran {fewest.repetitions} of {fewest.planned} repetitions within the budget of"
    if (run.path / "run.json").exists():
        return [f"{text} {budget}. Finish it with the same code: {describe_completion(run)}"]
    return [f"{text} {budget}. Measure again with a longer --budget"]


def _suggest_actions(comparison: RunComparison) -> list[str]:
    """Return sentences with the commands to run next, depending on the verdicts.

    They confirm a slowdown, get missing repetitions, or declare a difference intentional.
    """
    actions = []
    verdicts = comparison.verdicts
    if (
        Verdict.SLOWER in verdicts
        and not comparison.rule.is_paired
        and not comparison.new.plan.is_imported
    ):
        actions.append(
            "To confirm a slowdown without drift, interleave both versions: "
            "parbench ab --a-python BASE_PYTHON --b-python NEW_PYTHON -- OPTIONS_OF_RUN"
        )
    if Verdict.TOO_FEW_RUNS in verdicts:
        actions += _advise_missing_repetitions(comparison)
    failing = [change.path for _, change in comparison.count_changes if change.fails]
    if failing:
        actions.append(
            f"If a count changed on purpose, declare it: --across {failing[0]}, "
            "or --across 'counts.*' for all."
        )
    varying = [change.path for series in comparison.series for change in series.counts.varying]
    if varying:
        actions.append(
            "Counts differ between repetitions of BASE: the code may have changed during the run, "
            "for example by --resume on another branch. Measure it again. If the count depends on "
            f"data, declare it: --across {varying[0]}"
        )
    blocking = [change.path for change in comparison.environment_changes if change.is_blocking]
    if Verdict.ENVIRONMENT_CHANGED in verdicts and blocking:
        actions.append(f"If you test this difference, declare it: --across {blocking[0]}")
    return actions
