"""The report of a history check: its result in one sentence, its table, and explanations."""

from parbench.bench.results.formatting import format_percent
from parbench.bench.results.tables import Column, Row, Table
from parbench.bench.text import name_first, pluralize
from parbench.reports.analysis.labels import label_communication
from parbench.reports.compare.rendering import VerdictReport
from parbench.reports.compare.verdicts import FAILURES, MEANINGS, Verdict, format_verdicts
from parbench.reports.history.changes import (
    FALSE_DISCOVERY_RATE,
    MIN_LEVEL_RUNS,
    MIN_RUNS,
    STEP_FALSE_DISCOVERY_RATE,
)
from parbench.reports.history.check import MAX_RUNS, HistoryCheck, SeriesCheck, describe_change

MAX_NAMED_SERIES = 3
"""The number of series that a sentence or a row names."""
NOT_COMPARED = (Verdict.ENVIRONMENT_CHANGED, Verdict.NOT_ENOUGH_DATA, Verdict.MISSING)
"""The verdicts on series whose times were not compared."""
COLUMNS = (
    Column(key="verdict", title="verdict", is_result=True),
    Column(key="series", title="series", is_result=True),
    Column(key="seconds", title="time", kind="s"),
    Column(key="first_run", title="since run", is_result=True),
    Column(key="reason", title="observation", is_result=True),
)
"""The columns of the table of series."""


def build_report(check: HistoryCheck, exit_code: int = 0) -> VerdictReport:
    """Return the report of a history check.

    ``exit_code`` is the exit code of the command, which the JSON contains.
    """
    summary = summarize_check(check)
    table = build_table(check)
    return VerdictReport(
        title=summary,
        summary=[],
        tables=[table] if table.rows else [],
        explanations=explain_check(check),
        content={
            "summary": summary,
            "exit_code": exit_code,
            "verdicts": check.verdicts,
            "run": check.run,
            "min_effect": check.min_effect,
            "series": check.series,
            "overall": check.overall,
        },
    )


def summarize_check(check: HistoryCheck) -> str:
    """Return the result of a history check in one sentence.

    It begins with PASS or FAIL and has the number of cases with each verdict. If no case could be
    compared, it has the number of runs of a series, and begins with FAIL only if a case is missing.
    """
    is_failure = bool(check.compute_exit_code())
    if is_compared(check):
        return f"{'FAIL' if is_failure else 'PASS'}: {describe_result(check)}"
    number = check.num_earlier_runs + (not check.run.is_candidate)
    runs = f"each series has at most {number} of {MIN_RUNS} runs on {check.run.branch}"
    failure = f"FAIL: {format_verdicts(check.verdicts)}. " if is_failure else ""
    return f"{failure}Not enough history: {runs}. Times were not checked."


def is_compared(check: HistoryCheck) -> bool:
    """Return True if at least one case could be compared with earlier runs.

    False if each case has the verdict ENVIRONMENT CHANGED, NOT ENOUGH DATA or MISSING.
    """
    return any(verdict not in NOT_COMPARED for verdict in check.verdicts)


def describe_result(check: HistoryCheck) -> str:
    """Return the number of cases with each verdict and the number of earlier runs as text.

    For example ``2 SLOWER, 6 NO CHANGE, compared with the last 15 runs on main``.
    """
    runs = f"the last {pluralize(check.num_earlier_runs, 'run')} on {check.run.branch}"
    return f"{format_verdicts(check.verdicts)}, compared with {runs}"


def name_failures(check: HistoryCheck) -> str:
    """Return the labels and reasons of up to three cases with a failing verdict as text.

    Failing verdicts make the check fail, such as SLOWER, COUNT CHANGED or WRONG (``FAILURES``). The
    text is empty without such a case.
    """
    failures = [
        f"{label_communication(result.series.case)}: {result.reason}"
        for result in check.series
        if result.verdict in FAILURES
    ]
    return "; ".join(name_first(failures, MAX_NAMED_SERIES))


def build_table(check: HistoryCheck) -> Table:
    """Return the table of the cases with a verdict other than NO CHANGE.

    Cases with the same verdict and reason share a row.
    """
    groups: dict[tuple[Verdict, str], list[SeriesCheck]] = {}
    for result in check.series:
        if result.verdict != Verdict.NO_CHANGE:
            groups.setdefault((result.verdict, result.reason), []).append(result)
    rows: list[Row] = []
    for (verdict, reason), group in groups.items():
        labels = [result.series.case.label for result in group]
        rows.append(
            {
                "verdict": verdict,
                "series": ", ".join(name_first(labels, MAX_NAMED_SERIES)),
                "seconds": group[0].seconds.get(check.run.id) if len(group) == 1 else None,
                "first_run": group[0].first_run,
                "reason": reason,
            }
        )
    return Table(id="check", title="Series", columns=COLUMNS, rows=rows)


def _define_slower(check: HistoryCheck) -> list[str]:
    """Return sentences with the criterion of SLOWER: the compared runs, the test and thresholds.

    A run that is not part of the history is SLOWER by a rise, a run of the history by a step.
    """
    if check.run.is_candidate:
        change = (
            "the run is above the earlier runs since the last step, and above the newest of them"
        )
        rate = FALSE_DISCOVERY_RATE
    else:
        change = f"the newest {MIN_LEVEL_RUNS} or more runs are above the fastest earlier level"
        rate = STEP_FALSE_DISCOVERY_RATE
    return [
        f"SLOWER: {change}, by more than the threshold. Student's t-test on logarithms of times, "
        f"with a false discovery rate over series of {format_percent(rate)} (Benjamini-Hochberg).",
        f"Threshold: {format_percent(check.min_effect)}, or that of parbench aa for the series if "
        "it is higher.",
    ]


def explain_check(check: HistoryCheck) -> list[str]:
    """Return the sentences below the table of a check: meanings of verdicts and next commands."""
    branch = check.run.branch
    num_series = len(check.series)
    num_counts = sum(result.num_counts for result in check.series)
    num_changes = sum(len(result.count_changes) for result in check.series)
    sentences = [f"Run {check.run.id}: {num_changes} of {num_counts} exact counts changed."]
    if check.overall is not None:
        change = describe_change(check.overall, check.num_earlier_runs + 1)
        verdict = check.overall_verdict
        sentences.append(f"Overall: {verdict}, {change} for the median of {num_series} series.")
    if Verdict.SLOWER in (*check.verdicts, check.overall_verdict):
        sentences += _define_slower(check)
    defined = [name for name in check.verdicts if name not in (Verdict.SLOWER, Verdict.NO_CHANGE)]
    sentences += [f"{verdict}: {MEANINGS[verdict]}" for verdict in defined]
    sentences.append(
        f"A series is a case in one environment. Its times are checked once {branch} has "
        f"{MIN_RUNS} runs in this environment since its last annotation. The newest "
        f"{MAX_RUNS} are used. To add a run: parbench history add RUN --branch {branch}"
    )
    if is_compared(check):
        command = "parbench history annotate RUN --series GLOB --note TEXT"
        sentences.append(f"If a change is intended, annotate the run on {branch}: {command}")
    return sentences
