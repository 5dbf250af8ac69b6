"""The report of a history check: its result in one sentence, its table, and explanations."""

from collections.abc import Iterable, Sequence

from parbench.bench.results.tables import Column, Row, Table, keep_known_columns
from parbench.bench.text import pluralize
from parbench.reports.analysis.labels import label_communication
from parbench.reports.compare.rendering import VerdictReport
from parbench.reports.compare.thresholds import describe_thresholds
from parbench.reports.compare.verdicts import FAILURES, MEANINGS, Verdict, format_verdicts
from parbench.reports.history.changes import FALSE_DISCOVERY_RATE
from parbench.reports.history.check import HistoryCheck, SeriesCheck, describe_change
from parbench.reports.history.levels import MIN_LEVEL_RUNS

MAX_NAMED_SERIES = 3
"""The number of failed series that a sentence names."""
NOT_COMPARED = (Verdict.ENVIRONMENT_CHANGED, Verdict.TOO_FEW_RUNS)
"""The verdicts on series whose times were not compared."""
UNDECIDED = (Verdict.UNCONFIRMED, Verdict.DRIFT, *NOT_COMPARED)
"""The verdicts on series for which the check does not decide whether they became slower."""
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
            "rule": check.rule,
            "series": check.series,
            "overall": check.overall,
        },
    )


def summarize_check(check: HistoryCheck) -> str:
    """Return the result of a history check in one sentence: PASS, FAIL, or not enough history."""
    if all(verdict in NOT_COMPARED for verdict in check.verdicts):
        number = max((_count_runs(check, result) for result in check.series), default=0)
        text = f"Not enough history: {number} of {check.rule.min_runs} runs on {check.run.branch}"
        return f"{text}. Times were not checked. {_summarize_counts(check)}".rstrip()
    is_failure = any(verdict in FAILURES for verdict in (*check.verdicts, check.overall_verdict))
    return f"{'FAIL' if is_failure else 'PASS'}: {describe_result(check)}"


def describe_result(check: HistoryCheck) -> str:
    """Return the result of a history check as a phrase: ``2 SLOWER of 8 series, compared with ...``.

    The phrase ends with the number of earlier runs and the branch. If no case failed, it states
    that none is slower, or that only the median of all cases is. Undecided cases are counted.
    """
    runs = f"the last {pluralize(check.num_earlier_runs, 'run')} on {check.run.branch}"
    total = f"{len(check.series)} series"
    failures = _format_verdicts(check, FAILURES)
    if failures:
        return f"{failures} of {total}, compared with {runs}"
    if check.overall_verdict in FAILURES:
        return f"the median of {total} is slower, compared with {runs}"
    undecided = _format_verdicts(check, UNDECIDED)
    text = f"none of {total} is slower, compared with {runs}"
    return f"{text} ({undecided})" if undecided else text


def name_failures(check: HistoryCheck) -> str:
    """Return the labels of the cases that failed, each with its change. Empty if none failed.

    At most ``MAX_NAMED_SERIES`` are named, and the others are counted.
    """
    failures = [result for result in check.series if result.verdict in FAILURES]
    named = ", ".join(map(_describe_failure, failures[:MAX_NAMED_SERIES]))
    num_hidden = len(failures) - MAX_NAMED_SERIES
    return f"{named} and {num_hidden} more" if num_hidden > 0 else named


def _describe_failure(result: SeriesCheck) -> str:
    """Return the label of a failed case with its first changed count: calls, bytes or memory.

    If no count changed, it is followed by the change of the time in percent, otherwise by the
    verdict.
    """
    label = label_communication(result.series.case)
    if result.count_changes:
        return f"{label}: {result.count_changes[0]}"
    if result.change is None:
        return f"{label} {result.verdict.lower()}"
    return f"{label} {100 * result.change.change:+.1f} %"


def _count_runs(check: HistoryCheck, result: SeriesCheck) -> int:
    """Return the number of runs of the history whose times of a case were used.

    ``result`` is the verdict on the case. The checked run counts only if it is part of the history.
    """
    return sum(run_id != check.run.id or not check.run.is_candidate for run_id in result.runs)


def _format_verdicts(check: HistoryCheck, verdicts: Iterable[Verdict]) -> str:
    """Return the number of cases with each of ``verdicts`` as text: ``2 SLOWER, 1 DRIFT``.

    Empty if no case has one of them.
    """
    return format_verdicts({name: num for name, num in check.verdicts.items() if name in verdicts})


def _summarize_counts(check: HistoryCheck) -> str:
    """Return a sentence with the number of exact counts that changed. Empty if none was compared.

    Exact counts are calls, bytes, memory and the schedule of a step.
    """
    num_counts = sum(result.num_counts for result in check.series)
    num_changes = sum(len(result.count_changes) for result in check.series)
    return f"{num_changes} of {num_counts} exact counts changed." if num_counts else ""


def build_table(check: HistoryCheck) -> Table:
    """Return the table of verdicts, with a row for each case whose verdict is not NO CHANGE.

    Cases that are missing or not compared for the same reason share a row.
    """
    groups: dict[tuple[str, str, str], list[SeriesCheck]] = {}
    for result in check.series:
        if result.verdict != Verdict.NO_CHANGE:
            is_grouped = result.verdict in (Verdict.MISSING, *NOT_COMPARED)
            name = "" if is_grouped else result.series.fingerprint
            groups.setdefault((result.verdict, result.reason, name), []).append(result)
    rows = [_build_row(group, check.run.is_candidate) for group in groups.values()]
    return Table(id="check", title="Series", columns=keep_known_columns(COLUMNS, rows), rows=rows)


def _build_row(group: Sequence[SeriesCheck], is_candidate: bool) -> Row:
    """Return the row of a case, or of several cases with the same verdict and reason.

    The keys are ``verdict``, ``reason`` and ``series`` (the label, or the number of cases). The row
    of one case also has ``seconds`` (in the checked run) and ``first_run`` (the id of the run with
    which the change began). ``is_candidate`` is True if the checked run is not part of the history.
    ``first_run`` is then None.
    """
    first = group[0]
    row = {"verdict": first.verdict, "reason": first.reason}
    if len(group) > 1:
        return {**row, "series": f"{len(group)} series"}
    seconds = first.seconds[-1] if first.seconds else None
    return {
        **row,
        "series": first.series.case.label,
        "seconds": seconds,
        "first_run": None if is_candidate else first.first_run,
    }


def explain_check(check: HistoryCheck) -> list[str]:
    """Return the sentences below the table of a check: meanings of verdicts and next commands."""
    rule, branch, verdicts = check.rule, check.run.branch, check.verdicts
    numbers = format_verdicts(verdicts) or "no series"
    relation = "compared with" if check.run.is_candidate else "of"
    is_compared = any(verdict not in (Verdict.MISSING, *NOT_COMPARED) for verdict in verdicts)
    sentences = [f"Run {check.run.id} {relation} {branch}: {numbers}."]
    if is_compared:
        sentences.append(_describe_overall(check))
        sentences.append(_define_slower(check))
        sentences.append(_summarize_counts(check))
    else:
        command = f"parbench history add RUN --branch {branch}"
        sentences.append(
            f"Times are checked after {rule.min_runs} runs on {branch}. The GitHub action adds a "
            f"run for each push to {branch}. Elsewhere, add each run: {command}"
        )
    # SLOWER is defined above. The others are those in the table.
    defined = [name for name in verdicts if name not in (Verdict.SLOWER, Verdict.NO_CHANGE)]
    sentences += [f"{verdict}: {MEANINGS[verdict]}" for verdict in defined]
    sentences += describe_thresholds([result.threshold for result in check.series])
    sentences.append(
        f"A series is a case in one environment. Its times are checked once {branch} has "
        f"{rule.min_runs} runs in this environment since its last annotation. "
        f"The newest {rule.window} are used."
    )
    if is_compared:
        when = f" after it is merged into {branch}" if check.run.is_candidate else ""
        command = "parbench history annotate RUN --series GLOB --note TEXT"
        sentences.append(f"If a change is intended, annotate its run{when}: {command}")
    return list(filter(None, sentences))


def _describe_overall(check: HistoryCheck) -> str:
    """Return a sentence about the change of the median over all cases, empty without a change."""
    if check.overall is None:
        return ""
    verdict = check.overall_verdict
    change = describe_change(check.overall, check.num_earlier_runs + 1)
    sentence = f"Overall: {verdict}, {change} for the median of {len(check.series)} series"
    if verdict not in check.verdicts:
        sentence += ", although no single series is significant on its own"
    return f"{sentence}."


def _define_slower(check: HistoryCheck) -> str:
    """Return the definition of the verdict SLOWER, with the threshold and test of this check."""
    rule = check.rule
    threshold = f"{100 * rule.min_effect:g} %"
    test = f"significant at a false discovery rate of {100 * FALSE_DISCOVERY_RATE:g} %"
    if check.run.is_candidate:
        base = "the newest level and the newest run of the branch"
        return f"SLOWER: the time is more than {threshold} above {base} ({test})."
    runs = f"for at least {MIN_LEVEL_RUNS} runs"
    return f"SLOWER: {runs} more than {threshold} slower than the fastest earlier level ({test})."
