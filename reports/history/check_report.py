"""The result of a check as terminal text, Markdown for a GitHub step summary, and JSON."""

from collections.abc import Iterable
from typing import Any

from parbench.bench.results.formatting import format_case_size
from parbench.bench.results.tables import Column, Row, Table
from parbench.bench.text import pluralize
from parbench.reports.compare.thresholds import describe_thresholds
from parbench.reports.compare.verdicts import encode_report
from parbench.reports.history.check import Check, SeriesCheck
from parbench.reports.history.levels import FALSE_DISCOVERY_RATE
from parbench.reports.history.verdicts import (
    FAILURES,
    MEANINGS,
    NOT_COMPARED,
    UNDECIDED,
    HistoryVerdict,
)
from parbench.reports.labels import label_operation
from parbench.reports.render.markdown import escaped, markdown_table
from parbench.reports.render.terminal import Sheet

MAX_NAMED_SERIES = 3
MAX_MARKDOWN_ROWS = 150
"""A GitHub comment has at most 65,536 characters."""

COLUMNS = (
    Column(key="verdict", title="verdict", is_result=True),
    Column(key="series", title="series", is_result=True),
    Column(key="change", title="change", number_format="{:+.1f} %", kind="number", is_result=True),
    Column(key="seconds", title="time", kind="s", is_result=True),
    Column(key="since", title="since run", is_result=True),
    Column(key="reason", title="observation", is_result=True),
)


def render_text(check: Check, width: int | None = None) -> str:
    """Return the check for a terminal of so many columns. None stands for a pipe."""
    sheet = Sheet(width)
    sheet.write_text(summarize_check(check))
    table = build_table(check)
    if table.rows:
        sheet.write_table(table)
    sheet.write("")
    sheet.write_text(*explain_check(check))
    return sheet.text()


def render_markdown(check: Check) -> str:
    """Return the check as Markdown, the worst series first."""
    table = build_table(check)
    lines = [f"## {escaped(summarize_check(check))}", ""]
    if table.rows:
        lines += [markdown_table(table.varying, table.rows[:MAX_MARKDOWN_ROWS]), ""]
    num_hidden = len(table.rows) - MAX_MARKDOWN_ROWS
    if num_hidden > 0:
        lines += [f"{num_hidden} more rows are not shown. `--format json` has all rows.", ""]
    lines += [f"- {escaped(sentence)}" for sentence in explain_check(check)]
    return "\n".join(lines) + "\n"


def summarize_check(check: Check) -> str:
    """Return the result in one sentence: pass, fail, or not enough history."""
    failures = _list_failures(check)
    number = check.num_earlier_runs
    branch = check.run.branch
    if not failures and all(series.verdict in NOT_COMPARED for series in check.series):
        known = number + (not check.is_candidate)
        text = f"Not enough history: {known} of {check.rule.min_runs} runs on {branch}"
        return f"{text}. Times were not checked. {_summarize_counts(check)}".rstrip()
    compared = f"compared with the last {pluralize(number, 'run')} on {branch}"
    if failures:
        verdicts = [verdict for verdict in check.verdict_counts if verdict in FAILURES]
        named = ", ".join(failures[:MAX_NAMED_SERIES])
        num_hidden = len(failures) - MAX_NAMED_SERIES
        more = f" and {num_hidden} more" if num_hidden > 0 else ""
        text = _format_counts(check, verdicts)
        return f"FAIL: {text} of {len(check.series)} series, {compared}: {named}{more}"
    undecided = _format_counts(check, UNDECIDED)
    text = f"PASS: none of {len(check.series)} series is slower, {compared}"
    return f"{text} ({undecided})" if undecided else text


def _list_failures(check: Check) -> list[str]:
    """Return the failed series, each in a few words."""
    failures = []
    for series, change, _ in check.count_changes:
        if change.fails:
            failures.append(f"{label_operation(series.case)} {change.message}")
    for result in check.series:
        if result.verdict in FAILURES:
            failures.append(_describe_failure(result))
    return failures


def _describe_failure(result: SeriesCheck) -> str:
    case = result.series.case
    words = [label_operation(case)]
    if "size_bytes" in case.params:
        words.append(format_case_size(case.params["size_bytes"]))
    if result.change is None:
        words.append(result.verdict.lower())
    else:
        words.append(f"{100 * result.change:+.1f} %")
    return " ".join(words)


def _format_counts(check: Check, verdicts: Iterable[HistoryVerdict]) -> str:
    counts = check.verdict_counts
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts if verdict in counts)


def _summarize_counts(check: Check) -> str:
    if not check.counts:
        return ""
    number = sum(counts.num_compared for counts in check.counts)
    return f"{len(check.count_changes)} of {number} exact counts changed."


def build_table(check: Check) -> Table:
    """Return a row for each changed count, and for each series that is not NO CHANGE.

    Series that are not compared for the same reason share a row.
    """
    rows: list[Row] = []
    for series, change, since in check.count_changes:
        is_sure = change.verdict == "CHANGED"
        verdict = HistoryVerdict.COUNT_CHANGED if is_sure else HistoryVerdict.UNCONFIRMED
        label = series.case.label
        rows.append({"verdict": verdict, "series": label, "since": since, "reason": change.message})
    groups: dict[tuple[str, str, str], list[SeriesCheck]] = {}
    for result in check.series:
        is_grouped = result.verdict in UNDECIDED and result.verdict in NOT_COMPARED
        name = "" if is_grouped else result.series.fingerprint
        groups.setdefault((result.verdict, result.reason, name), []).append(result)
    for group in groups.values():
        if group[0].verdict != HistoryVerdict.NO_CHANGE:
            rows.append(_build_row(group))
    return Table(id="check", title="Series", columns=_keep_known(rows), rows=rows)


def _keep_known(rows: list[Row]) -> list[Column]:
    return [column for column in COLUMNS if any(row.get(column.key) for row in rows)]


def _build_row(group: list[SeriesCheck]) -> Row:
    first = group[0]
    observation = "; ".join(filter(None, (first.reason, *first.environment_changes)))
    row = {"verdict": first.verdict, "reason": observation, "since": first.since}
    if len(group) > 1:
        return {**row, "series": f"{len(group)} series"}
    return {
        **row,
        "series": first.series.case.label,
        "change": None if first.change is None else 100 * first.change,
        "seconds": first.times[-1][1] if first.times else None,
    }


def explain_check(check: Check) -> list[str]:
    """Return what was checked, what the verdicts mean and what to do, one fact per sentence."""
    rule, branch = check.rule, check.run.branch
    verdicts = check.verdict_counts
    is_compared = any(verdict not in NOT_COMPARED for verdict in verdicts)
    counts = _format_counts(check, HistoryVerdict) or "no series"
    relation = "compared with" if check.is_candidate else "of"
    sentences = [f"Run {check.run.id} {relation} {branch}: {counts}."]
    if is_compared:
        sentences.append(_define_slower(check))
    else:
        command = f"parbench history add RUN --branch {branch}"
        sentences.append(f"To enable the check of times, add runs: {command}")
    sentences += [
        f"{verdict}: {meaning}" for verdict, meaning in MEANINGS.items() if verdict in verdicts
    ]
    if check.counts and is_compared:
        sentences.append(f"Counts have no threshold: {_summarize_counts(check)}")
    sentences += describe_thresholds([result.threshold for result in check.series])
    sentences.append(
        f"A series is checked once {branch} has {rule.min_runs} runs in the same environment since "
        f"its last annotation. The newest {rule.window} are used."
    )
    if is_compared or check.count_changes:
        when = f" after it is merged into {branch}" if check.is_candidate else ""
        command = "parbench history annotate RUN --series GLOB --note TEXT"
        sentences.append(f"If a change is intended, annotate its run{when}: {command}")
    return sentences


def _define_slower(check: Check) -> str:
    rule = check.rule
    threshold = f"{100 * rule.threshold:g} %"
    test = f"significant by t-test, false discovery rate {100 * FALSE_DISCOVERY_RATE:g} %"
    if check.is_candidate:
        base = "the newest level and the newest run of the branch"
        return f"SLOWER: the time is more than {threshold} above {base} ({test})."
    runs = f"for at least {rule.min_level_runs} runs"
    return f"SLOWER: {runs} more than {threshold} slower than the fastest earlier level ({test})."


def render_json(check: Check, exit_code: int) -> str:
    """Return all series as JSON. Times are in seconds, changes are fractions, unknown is null."""
    return encode_report(
        {
            "run": check.run,
            "is_candidate": check.is_candidate,
            "summary": summarize_check(check),
            "exit_code": exit_code,
            "rule": check.rule,
            "verdicts": check.verdict_counts,
            "counts": {
                "num_compared": sum(counts.num_compared for counts in check.counts),
                "changes": [
                    {"case": series.case, "world": series.world, "since": since, **vars(change)}
                    for series, change, since in check.count_changes
                ],
            },
            "series": [_build_json_series(result) for result in check.series],
        }
    )


def _build_json_series(result: SeriesCheck) -> dict[str, Any]:
    names = ("low", "high", "slope", "p_value")
    step = {name: getattr(result.level_change, name, None) for name in names}
    return {
        "case": result.series.case,
        "world": result.series.world,
        "fingerprint": result.series.fingerprint,
        "verdict": result.verdict,
        "reason": result.reason,
        "change": result.change,
        **step,
        "since": result.since,
        "environment_changes": result.environment_changes,
        "seconds": [seconds for _, seconds in result.times],
        "threshold": result.threshold,
    }
