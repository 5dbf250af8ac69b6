"""The sentences about how a run was measured, below its tables."""

import re
from collections import Counter
from collections.abc import Sequence

from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.expected_bandwidth import describe_expected
from parbench.reports.analysis.overview import describe_measuring_time
from parbench.reports.analysis.steps import get_calls, get_profiled_seconds
from parbench.reports.run_data import RunData


def list_footnotes(data: RunData) -> tuple[str, ...]:
    """Return the sentences below a run's tables: units, methods, limits and notes of its cases."""
    sentences = []
    if data.communication:
        units = "GB/s is 1e9 bytes per second, and 64K is 65536 bytes"
        sentences.append(f"Sizes and bus bandwidth follow nccl-tests: {units}.")
    methods = _list_methods(data.measured)
    sentences += [f"Times: {method}." for method in methods]
    if methods:
        sentences.append("[low, high] is a 95 % confidence interval.")
    sentences += _explain_steps(data.steps)
    if data.run.info.repetitions:
        share = describe_measuring_time(data.run).capitalize()
        sentences.append(f"{share}: preparing, warming up, timing and checking cases.")
    if data.plan.repetitions == 1 and data.measured:
        hint = "Import 5 logs" if data.plan.is_imported else "Use --repetitions 5"
        sentences.append(
            "One repetition: intervals and noise do not include the variation between repetitions. "
            f"{hint} to compare."
        )
    return (*sentences, *describe_expected(data), *_list_notes(data))


def _list_methods(results: Sequence[CaseResult]) -> list[str]:
    """Return phrases about how the durations of cases were computed, the most common first.

    An example is ``median of iterations in visits of one repetition``. The numbers of iterations
    and visits (blocks of iterations) are removed from the phrases, because they differ between
    cases.
    """
    headlines = [result.metrics.get(result.headline) for result in results]
    methods = Counter(metric.method for metric in headlines if metric and metric.method)
    without_numbers = [
        re.sub(r"\d+ (?=iterations|visits)", "", method) for method, _ in methods.most_common()
    ]
    return list(dict.fromkeys(without_numbers))


def _explain_steps(steps: Sequence[CaseResult]) -> list[str]:
    """Return sentences on predicted communication and on the parts of profiled training steps.

    Each sentence is left out if no step has the numbers that it explains.
    """
    sentences = []
    if any(get_calls(step) is not None for step in steps):
        sentences.append(
            "Predicted comm: the calls of a step one after another, each predicted from this run's "
            "blocking fit of the same operation on as many ranks."
        )
    if any(map(get_profiled_seconds, steps)):
        sentences += [
            "The parts and the residual of a step add up to the wall time of the profiled step.",
            "Differences such as ect are means over paired measurements.",
        ]
    return sentences


def _list_notes(data: RunData) -> list[str]:
    """Return the notes of the plan and of cases, each with the number of cases that have it.

    Notes of measured training steps are left out, because the table of steps shows them.
    """
    plan_notes = data.plan.notes
    results = [result for result in data.results if result.is_communication or not result.metrics]
    counts = Counter(note for result in results for note in result.notes)
    case_notes = [
        f"Note ({count} of {len(data.results)} cases): {note}"
        for note, count in counts.items()
        if note not in plan_notes
    ]
    return [*(f"Note (all cases): {note}" for note in plan_notes), *case_notes]
