"""The sentences and numbers in the report on a comparison of the runs BASE and NEW."""

import fnmatch
from datetime import datetime

from parbench.bench.results.formatting import format_number, format_percent
from parbench.bench.text import format_duration, name_first, pluralize
from parbench.reports.analysis.verdicts import describe_emulations
from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.verdicts import MEANINGS, Verdict, count_verdicts, format_verdicts
from parbench.reports.limits import describe_limits
from parbench.reports.stats import Effect

MAX_NAMED_SERIES = 3
"""The number of slower series that a sentence names."""


def format_effect(effect: Effect) -> str:
    """Return a change of the time with its 95 % interval as text: ``+5.1 % [+3.9, +6.3]``.

    An effect without an interval gives only the change: ``+5.1 %``.
    """
    change, low, high = (
        f"{'+' if fraction > 0 else ''}{format_number(100 * fraction)}"
        for fraction in (effect.change, effect.low or 0.0, effect.high or 0.0)
    )
    has_interval = effect.low is not None and effect.high is not None
    return f"{change} % [{low}, {high}]" if has_interval else f"{change} %"


def summarize_comparison(comparison: RunComparison) -> list[str]:
    """Return the sentences of the summary: limits on metrics, exact counts, times, and both runs."""
    sentences = describe_limits(comparison.limits)
    if comparison.num_counts or comparison.count_changes:
        sentences.append(_describe_counts(comparison))
    sentences.append(_describe_times(comparison))
    for name, data in (("BASE", comparison.base), ("NEW", comparison.new)):
        run = data.run
        measured = len({record.repetition for record in run.records if record.status == "ok"})
        sentences.append(
            f"{name}: {run.path}, host {run.info.host}, started {run.info.started}, "
            f"{pluralize(measured, 'repetition')}"
        )
        sentences += [f"{name} is {note}" for note in describe_emulations(run)]
    return sentences


def _describe_counts(comparison: RunComparison) -> str:
    """Return a sentence with the number of counts (calls, bytes, memory) that differ between runs.

    It also describes the change with the worst verdict.
    """
    changed = comparison.count_changes
    if not changed:
        return f"Counts: none of {comparison.num_counts} changed."
    named = [f"{series.case.short_name}: {change.message}" for series, change in changed]
    return (
        f"Counts: {len(changed)} differ, {comparison.num_counts} were compared: "
        f"{', '.join(name_first(named, 1))}."
    )


def _describe_times(comparison: RunComparison) -> str:
    """Return a sentence with the number and the names of cases that became slower.

    The case with the largest change comes first. If times were judged and no case became slower,
    the sentence states this. If no time was judged, it has the number of cases with each verdict on
    other aspects, such as FAILED, MISSING or NOT ENOUGH DATA.
    """
    if not comparison.num_judged:
        verdicts = count_verdicts(series.verdict for series in comparison.series)
        what = "Times were not checked" if comparison.num_counts else "Nothing was checked"
        return f"{what}: {format_verdicts(verdicts)}."
    slower = [
        (series.effect, series.label)
        for series in comparison.series
        if series.verdict == Verdict.SLOWER and series.effect
    ]
    judged = f"{comparison.num_judged} series"
    if not slower:
        return f"Times: none of {judged} became significantly slower."
    slower.sort(key=lambda pair: -pair[0].change)
    named = [f"{label} {format_effect(effect)}" for effect, label in slower]
    text = ", ".join(name_first(named, MAX_NAMED_SERIES))
    return f"Times: {len(slower)} of {judged} became slower: {text}."


def explain_comparison(comparison: RunComparison) -> list[str]:
    """Return the sentences below the tables of a comparison.

    They are the meaning of each verdict that occurs, the test of times, runs that were left out, and
    recommended commands.
    """
    return [
        *(f"{verdict}: {MEANINGS[verdict]}" for verdict in comparison.verdicts),
        *(_describe_method(comparison) if comparison.num_judged else ()),
        *comparison.base.run.exclusions,
        *comparison.new.run.exclusions,
        *_suggest_actions(comparison),
    ]


def _describe_method(comparison: RunComparison) -> list[str]:
    """Return sentences about the test of times, its threshold and the drift of the machine."""
    rule = comparison.rule
    highest = max(series.times.min_effect for series in comparison.series)
    threshold = (
        f"Threshold: at most {format_percent(highest)}, the larger of --min-effect and that of "
        f"parbench aa. The false discovery rate over series is {format_percent(rule.level)} "
        "(Benjamini-Hochberg)."
    )
    if rule.is_paired:
        return [
            "Change: geometric mean of the time ratios of paired repetitions, "
            "with 95 % confidence interval (t-test on log ratios).",
            threshold,
            "Repetitions were interleaved (ABBA), so linear machine drift cancels.",
        ]
    sentences = [
        "Change: ratio of the geometric means over repetitions, "
        "with 95 % confidence interval (Welch's t-test on logarithms).",
        threshold,
    ]
    if not any(data.plan.is_imported for data in (comparison.base, comparison.new)):
        base_start, new_start = (
            datetime.fromisoformat(data.run.info.started)
            for data in (comparison.base, comparison.new)
        )
        distance = format_duration(abs((new_start - base_start).total_seconds()))
        sentences.append(
            f"BASE and NEW started {distance} apart. "
            "Machine drift in that time is included in the change."
        )
    return sentences


def _suggest_actions(comparison: RunComparison) -> list[str]:
    """Return sentences with the commands to run next, depending on the verdicts.

    The commands confirm a slowdown, measure missing repetitions, or declare a difference
    intentional.
    """
    actions = []
    verdicts = comparison.verdicts
    if Verdict.SLOWER in verdicts and not comparison.rule.is_paired:
        actions.append(
            "To confirm a slowdown without drift, interleave both versions: "
            "parbench ab --a-python BASE_PYTHON --b-python NEW_PYTHON -- OPTIONS_OF_RUN"
        )
    if Verdict.UNDECIDED in verdicts:
        actions.append(
            "To decide an UNDECIDED series, measure more repetitions. parbench ab makes up to 24."
        )
    if Verdict.NOT_ENOUGH_DATA in verdicts:
        number = comparison.rule.min_repetitions
        actions.append(
            f"To get {number} repetitions, use parbench run --repetitions {number} with a longer "
            "--budget, parbench run --resume RUN, or a folder with several runs or imported logs."
        )
    paths = [change.path for change in comparison.environment_changes]
    paths += dict.fromkeys(change.path for _, change in comparison.count_changes)
    names = ", ".join(name_first(paths, MAX_NAMED_SERIES)) or "none"
    for glob in comparison.intended:
        if glob != "*" and not fnmatch.filter(paths, glob):
            actions.append(f"--across {glob} matches no difference. The differences are: {names}")
    count_paths = [change.path for _, change in comparison.count_changes if not change.is_intended]
    if count_paths:
        actions.append(
            f"If a count changed on purpose, declare it: --across {count_paths[0]}, "
            "or --across 'counts.*' for all. Values joined by 'or' are of different repetitions: "
            "the count depends on data, or the code changed during the run."
        )
    blocking = [change.path for change in comparison.environment_changes if change.is_blocking]
    if blocking:
        actions.append(f"If you test this difference, declare it: --across {blocking[0]}")
    return actions
