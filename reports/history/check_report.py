"""The result of a check as terminal text, Markdown for a GitHub step summary, and JSON."""

from collections.abc import Iterable, Sequence

from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.tables import Column, Row, Table, keep_known_columns
from parbench.bench.text import pluralize
from parbench.reports.analysis.labels import label_operation
from parbench.reports.compare.thresholds import describe_thresholds
from parbench.reports.compare.verdicts import encode_report
from parbench.reports.history.check import HistoryCheck, SeriesCheck
from parbench.reports.history.levels import FALSE_DISCOVERY_RATE
from parbench.reports.history.verdicts import (
    FAILURES,
    MEANINGS,
    NOT_COMPARED,
    UNDECIDED,
    HistoryVerdict,
)
from parbench.reports.render.markdown import escaped, markdown_table
from parbench.reports.render.terminal import Sheet

MAX_NAMED_SERIES = 3
MAX_MARKDOWN_ROWS = 150  # A GitHub comment has at most 65,536 characters.
COLUMNS = (
    Column(key="verdict", title="verdict", is_result=True),
    Column(key="series", title="series", is_result=True),
    Column(key="seconds", title="time", kind="s", is_result=True),
    Column(key="first_run", title="since run", is_result=True),
    Column(key="reason", title="observation", is_result=True),
)


def render_text(check: HistoryCheck, width: int | None = None) -> str:
    """Return the check for a terminal of so many columns. None stands for a pipe."""
    sheet = Sheet(width)
    sheet.write_text(summarize_check(check))
    table = build_table(check)
    if table.rows:
        sheet.write_table(table)
    sheet.write("")
    sheet.write_text(*explain_check(check))
    return sheet.text()


def render_markdown(check: HistoryCheck) -> str:
    """Return the check as Markdown, the worst series first."""
    table = build_table(check)
    lines = [f"## {escaped(summarize_check(check))}", ""]
    if table.rows:
        lines += [markdown_table(table.columns, table.rows[:MAX_MARKDOWN_ROWS]), ""]
    num_hidden = len(table.rows) - MAX_MARKDOWN_ROWS
    if num_hidden > 0:
        lines += [f"{num_hidden} more rows are not shown. `--format json` has all rows.", ""]
    lines += [f"- {escaped(sentence)}" for sentence in explain_check(check)]
    return "\n".join(lines) + "\n"


def render_json(check: HistoryCheck, exit_code: int) -> str:
    """Return the check as JSON. Times are in seconds, changes are fractions, unknown is null."""
    return encode_report(
        {
            "summary": summarize_check(check),
            "exit_code": exit_code,
            "verdicts": check.verdicts,
            "run": check.run,
            "rule": check.rule,
            "series": check.series,
        }
    )


def summarize_check(check: HistoryCheck) -> str:
    """Return the result in one sentence: pass, fail, or not enough history."""
    branch = check.run.branch
    failures = [result for result in check.series if result.verdict in FAILURES]
    if not failures and all(result.verdict in NOT_COMPARED for result in check.series):
        number = max((_count_runs(check, result) for result in check.series), default=0)
        text = f"Not enough history: {number} of {check.rule.min_runs} runs on {branch}"
        return f"{text}. Times were not checked. {_summarize_counts(check)}".rstrip()
    compared = f"compared with the last {pluralize(check.num_earlier_runs, 'run')} on {branch}"
    if failures:
        named = ", ".join(map(_describe_failure, failures[:MAX_NAMED_SERIES]))
        num_hidden = len(failures) - MAX_NAMED_SERIES
        more = f" and {num_hidden} more" if num_hidden > 0 else ""
        text = _format_verdicts(check, FAILURES)
        return f"FAIL: {text} of {len(check.series)} series, {compared}: {named}{more}"
    undecided = _format_verdicts(check, UNDECIDED)
    text = f"PASS: none of {len(check.series)} series is slower, {compared}"
    return f"{text} ({undecided})" if undecided else text


def _count_runs(check: HistoryCheck, result: SeriesCheck) -> int:
    """Return the number of runs on the branch that measured a series."""
    return sum(run_id != check.run.id or not check.run.is_candidate for run_id in result.runs)


def _describe_failure(result: SeriesCheck) -> str:
    case = result.series.case
    name = label_operation(case)
    if "size_bytes" in case.params:
        name = f"{name} {format_case_size(case.params['size_bytes'])}"
    if result.count_changes:
        return f"{name}: {result.count_changes[0]}"
    if result.change is None:
        return f"{name} {result.verdict.lower()}"
    return f"{name} {100 * result.change.change:+.1f} %"


def _format_verdicts(check: HistoryCheck, verdicts: Iterable[HistoryVerdict]) -> str:
    numbers = check.verdicts
    return ", ".join(f"{numbers[verdict]} {verdict}" for verdict in verdicts if verdict in numbers)


def _summarize_counts(check: HistoryCheck) -> str:
    num_counts = sum(result.num_counts for result in check.series)
    num_changes = sum(len(result.count_changes) for result in check.series)
    return f"{num_changes} of {num_counts} exact counts changed." if num_counts else ""


def build_table(check: HistoryCheck) -> Table:
    """Return a row for each series that is not NO CHANGE.

    Series that are not compared for the same reason share a row.
    """
    groups: dict[tuple[str, str, str], list[SeriesCheck]] = {}
    for result in check.series:
        if result.verdict != HistoryVerdict.NO_CHANGE:
            is_grouped = result.verdict in NOT_COMPARED
            name = "" if is_grouped else result.series.fingerprint
            groups.setdefault((result.verdict, result.reason, name), []).append(result)
    rows = [_build_row(group) for group in groups.values()]
    return Table(id="check", title="Series", columns=keep_known_columns(COLUMNS, rows), rows=rows)


def _build_row(group: Sequence[SeriesCheck]) -> Row:
    first = group[0]
    row = {"verdict": first.verdict, "reason": first.reason}
    if len(group) > 1:
        return {**row, "series": f"{len(group)} series"}
    seconds = first.seconds[-1] if first.seconds else None
    return {
        **row,
        "series": first.series.case.label,
        "seconds": seconds,
        "first_run": first.first_run,
    }


def explain_check(check: HistoryCheck) -> list[str]:
    """Return sentences on the check, the meaning of its verdicts and the next command."""
    rule, branch, verdicts = check.rule, check.run.branch, check.verdicts
    numbers = _format_verdicts(check, HistoryVerdict) or "no series"
    relation = "compared with" if check.run.is_candidate else "of"
    is_compared = any(verdict not in NOT_COMPARED for verdict in verdicts)
    sentences = [f"Run {check.run.id} {relation} {branch}: {numbers}."]
    if is_compared:
        sentences.append(_define_slower(check))
        sentences.append(_summarize_counts(check))
    else:
        command = f"parbench history add RUN --branch {branch}"
        sentences.append(f"To enable the check of times, add runs: {command}")
    sentences += [f"{verdict}: {MEANINGS[verdict]}" for verdict in verdicts if verdict in MEANINGS]
    sentences += describe_thresholds([result.threshold for result in check.series])
    sentences.append(
        f"A series is checked once {branch} has {rule.min_runs} runs in the same environment since "
        f"its last annotation. The newest {rule.window} are used."
    )
    if is_compared:
        when = f" after it is merged into {branch}" if check.run.is_candidate else ""
        command = "parbench history annotate RUN --series GLOB --note TEXT"
        sentences.append(f"If a change is intended, annotate its run{when}: {command}")
    return list(filter(None, sentences))


def _define_slower(check: HistoryCheck) -> str:
    rule = check.rule
    threshold = f"{100 * rule.threshold:g} %"
    test = f"significant by t-test, false discovery rate {100 * FALSE_DISCOVERY_RATE:g} %"
    if check.run.is_candidate:
        base = "the newest level and the newest run of the branch"
        return f"SLOWER: the time is more than {threshold} above {base} ({test})."
    runs = f"for at least {rule.min_level_runs} runs"
    return f"SLOWER: {runs} more than {threshold} slower than the fastest earlier level ({test})."
