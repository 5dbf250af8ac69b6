"""The verdicts on a run (correct, complete, quiet), its failed cases, and corrupt records."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parbench.bench.launch.budget import estimate_run_seconds, format_budget
from parbench.bench.machine.environment import describe_emulation
from parbench.bench.results.formatting import format_percent
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import format_duration, pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.repetitions import describe_host_disturbance
from parbench.reports.run_data import RunData

Level = Literal["good", "doubtful", "bad"]
"""The severity of a verdict, which decides its color."""

MAX_NOISY_SHARE = 0.1
"""A run is quiet if at most this share of its cases, as a fraction, is noisy."""
STATUS_VERBS = {"hang": "hung", "failed": "failed"}
"""The verb of a sentence about cases with a status that makes a run incomplete."""


@dataclass(frozen=True)
class ReportVerdict:
    """A verdict on one aspect of a run: correctness, completeness or noise."""

    word: str
    """The verdict in capitals, such as ``CORRECT``, ``PARTIAL`` or ``NOISY``."""
    level: Level
    """``good``, ``doubtful`` or ``bad``, which decides the color."""
    message: str
    """The numbers behind the verdict: a sentence without its period."""
    hint: str = ""
    """The next action, such as ``Finish: parbench run --resume RUN``."""

    @property
    def sentence(self) -> str:
        """The message and the hint as sentences."""
        message = f"{self.message[:1].upper()}{self.message[1:]}."
        return f"{message} {self.hint}" if self.hint else message


def judge_run(data: RunData) -> tuple[ReportVerdict, ...]:
    """Return the verdicts on correctness, completeness and noise of a run, in this order.

    Correctness needs a checked case, noise needs a measured case. Otherwise they are left out.
    """
    checked = [result for result in data.results if result.status == "wrong" or result.repetitions]
    measured = [result for result in data.results if result.repetitions]
    verdicts = [_judge_completeness(data, measured)]
    if checked:
        verdicts.insert(0, _judge_correctness(checked))
    if measured:
        verdicts.append(_judge_noise(data.run, measured))
    return tuple(verdicts)


def _judge_correctness(results: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict on the comparison of results with the reference.

    WRONG if a result differs, CORRECT if those compared are equal, UNCHECKED if none was compared.
    ``results`` are the cases that ran.
    """
    num_unchecked = sum(result.check.passed is None for result in results)
    num_wrong = sum(result.status == "wrong" for result in results)
    if num_wrong:
        return ReportVerdict(
            "WRONG",
            "bad",
            f"{num_wrong} of {len(results)} results differ from the reference",
            hint="Do not use their times",
        )
    num_checked = len(results) - num_unchecked
    message = f"{num_checked} of {len(results)} results match the reference"
    if 0 < num_unchecked < len(results):
        results_text = pluralize(num_checked, "checked result")
        message = f"{results_text} match the reference, {num_unchecked} unchecked"
    return ReportVerdict(
        word="CORRECT" if num_checked else "UNCHECKED",
        level="doubtful" if num_unchecked else "good",
        message=message,
    )


def _judge_completeness(data: RunData, measured: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict on missing measurements of a run.

    BROKEN: a case failed or hung. UNFINISHED: a planned repetition has no record. NOTHING MEASURED:
    no case has a result. Otherwise COMPLETE or PARTIAL. ``measured`` are the cases that a
    repetition measured.
    """
    path = data.run.path
    failures: dict[Status, int] = {
        status: count for status, count in data.status_counts.items() if status in STATUS_VERBS
    }
    if failures:
        parts = [f"{count} {STATUS_VERBS[status]}" for status, count in failures.items()]
        message = f"{' and '.join(parts)} of {pluralize(len(data.plan.cases), 'case')}"
        return ReportVerdict("BROKEN", "bad", message, hint=f"Logs: {path / 'logs'}")
    if data.num_missing:
        message = f"{data.num_missing} of {data.num_planned} measurements have no record"
        hint = f"Finish: parbench run --resume {path}"
        return ReportVerdict("UNFINISHED", "bad", message, hint=hint)
    if not measured:
        return _explain_nothing_measured(data)
    return _count_repetitions(data, measured)


def _explain_nothing_measured(data: RunData) -> ReportVerdict:
    """Return the verdict NOTHING MEASURED, with the most common reason of skipped cases."""
    if _count_out_of_budget(data):
        budget = format_duration(data.plan.budget_seconds)
        message = f"the time budget of {budget} ended before the first case"
        hint = "Use a larger --budget"
    else:
        reasons = [skipped.reason for skipped in data.plan.skipped]
        reasons += [reason for result in data.results for reason in result.reasons]
        message = Counter(reasons).most_common(1)[0][0] if reasons else "the plan has no cases"
        hint = ""
    return ReportVerdict("NOTHING MEASURED", "bad", message, hint=hint)


def _count_out_of_budget(data: RunData) -> int:
    """Return the number of cases that have no measurement because the time budget ended."""
    return sum(
        result.status == "skipped" and all(record.is_out_of_budget for record in result.records)
        for result in data.results
    )


def _count_repetitions(data: RunData, measured: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict COMPLETE if each case ran all planned repetitions, otherwise PARTIAL.

    ``measured`` are the cases that at least one repetition measured. The message of PARTIAL lists
    how many cases ran how many repetitions: ``2 of 8 cases ran 1 of 5 repetitions``.
    """
    plan = data.plan
    num_out_of_budget = _count_out_of_budget(data)
    counts = Counter(
        result.repetitions
        for result in measured
        if result.status == "ok" and result.repetitions < result.planned
    )
    if num_out_of_budget:
        counts[0] = num_out_of_budget
    num_skipped = len(plan.skipped) + data.status_counts.get("skipped", 0) - num_out_of_budget
    suffix = f", and {pluralize(num_skipped, 'case')} cannot run here" if num_skipped else ""
    if not counts:
        repetitions = pluralize(plan.repetitions, "repetition")
        message = f"{pluralize(len(measured), 'case')} ran {repetitions} each{suffix}"
        return ReportVerdict("COMPLETE", "good", message)
    cases = pluralize(len(plan.cases), "case")
    shares = [
        f"{count} of {cases} ran {repetitions} of {plan.repetitions} repetitions"
        for repetitions, count in sorted(counts.items())
    ]
    budget = format_duration(plan.budget_seconds)
    return ReportVerdict(
        word="PARTIAL",
        level="bad" if data.exit_code == 4 else "doubtful",
        message=f"within the budget of {budget} {' and '.join(shares)}{suffix}",
        hint=f"Finish: {describe_completion(data.run)}",
    )


def describe_completion(run: Run) -> str:
    """Return two ways to finish a run whose time budget was too short.

    The text has the command that resumes the run, and a budget that suffices.
    """
    budget = format_budget(estimate_run_seconds(run))
    return f"parbench run --resume {run.path}, or use --budget {budget}"


def find_noisy(results: Sequence[CaseResult]) -> tuple[CaseResult, ...]:
    """Return the cases whose duration varies by more than 15 % between repetitions.

    The result is empty if they are at most 10 % of the cases with a known variation.
    """
    known = [result for result in results if result.variation is not None]
    noisy = [result for result in known if result.noise in ("noisy", "very noisy")]
    return tuple(noisy) if len(noisy) > MAX_NOISY_SHARE * len(known) else ()


def _judge_noise(run: Run, results: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict on the variation between repetitions: NOISE UNKNOWN, QUIET or NOISY.

    ``results`` are the measured cases. The message has the median of their variations.
    """
    variations = [result.variation for result in results if result.variation is not None]
    if not variations:
        count = pluralize(max(result.repetitions for result in results), "repetition")
        message = f"the variation between repetitions is unknown ({count})"
        hint = "Import 5 logs" if run.info.plan.is_imported else "Use --repetitions 5"
        return ReportVerdict("NOISE UNKNOWN", "doubtful", message, hint=hint)
    noisy = find_noisy(results)
    message = f"the median variation between repetitions is {format_percent(median(variations))}"
    if not noisy:
        return ReportVerdict("QUIET", "good", message)
    cases = pluralize(len(variations), "case")
    message += f", and over 15 % in {len(noisy)} of {cases}"
    disturbance = describe_host_disturbance(run)
    if disturbance:
        message += f". Possible cause: {disturbance}"
    hint = "Find causes: parbench doctor"
    return ReportVerdict("NOISY", "doubtful", message, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row of the table of problems: a case that failed, hung, was wrong, or was not measured."""

    case: str
    """The label of the case, or the name and the number of several cases without records."""
    status: str
    """``failed``, ``hang``, ``wrong``, ``skipped`` or ``not measured``."""
    repetitions: str
    """The number of repetitions with this status over the planned number: ``1/5``, or ``all``."""
    reason: str
    """A sentence about why the case has the status."""
    result: CaseResult | None = None
    """The result with the records of the case, None if there is no record."""


def list_problems(data: RunData) -> tuple[Problem, ...]:
    """Return a ``Problem`` for each case that failed, hung or was wrong, in plan order."""
    return tuple(
        _make_problem(result) for result in data.results if result.status not in ("ok", "skipped")
    )


def list_unmeasured(data: RunData) -> tuple[Problem, ...]:
    """Return a ``Problem`` for each skipped case, then one for each benchmark without records.

    Cases without records are combined by benchmark name, because they have the same reason.
    """
    problems = [
        Problem(case=skipped.case.label, status="skipped", repetitions="all", reason=skipped.reason)
        for skipped in data.plan.skipped
    ]
    problems += [_make_problem(result) for result in data.results if result.status == "skipped"]
    for name in dict.fromkeys(missing.case.name for missing in data.missing):
        group = [missing for missing in data.missing if missing.case.name == name]
        num_repetitions = sum(missing.repetitions for missing in group)
        num_planned = sum(missing.planned for missing in group)
        case = group[0].case.label if len(group) == 1 else f"{name} ({len(group)} cases)"
        problem = Problem(
            case=case,
            status="not measured",
            repetitions=f"{num_repetitions}/{num_planned}",
            reason="no record, because the run ended before",
        )
        problems.append(problem)
    return tuple(problems)


def _make_problem(result: CaseResult) -> Problem:
    """Return the ``Problem`` of a case whose status is not ok."""
    num_repetitions = sum(record.status == result.status for record in result.records)
    return Problem(
        case=result.case.label,
        status=result.status,
        repetitions=f"{num_repetitions}/{result.planned}",
        reason="; ".join(result.reasons) or "no reason was recorded",
        result=result,
    )


def list_warnings(run: Run) -> tuple[str, ...]:
    """Return sentences about lines of ``records.jsonl`` that cannot be read."""
    hint = f"Measure them again: parbench run --resume {run.path}"
    warnings = []
    if run.damaged:
        lines = pluralize(len(run.damaged), "line")
        problem = f"{lines} of records.jsonl cannot be read and are ignored"
        warnings.append(f"{problem}. The first: {run.damaged[0]}. {hint}")
    if not _ends_with_newline(run):
        problem = "The last line of records.jsonl is incomplete and is ignored"
        warnings.append(f"{problem}. {hint}")
    return tuple(warnings)


def _ends_with_newline(run: Run) -> bool:
    """Return True if ``records.jsonl`` ends with a complete line, or is empty or missing."""
    try:
        with (run.path / "records.jsonl").open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return True


def describe_emulations(run: Run) -> tuple[str, ...]:
    """Return a sentence for each emulation of nodes or links in a run.

    The number of emulated records is added unless all records are emulated.
    """
    total = len(run.records)
    counts = Counter(record.emulation for record in run.records if record.emulation)
    if run.info.plan.emulation:
        counts[run.info.plan.emulation] = total
    sentences = []
    for emulation, count in counts.items():
        suffix = "" if count >= total else f" ({count} of {total} records)"
        sentences.append(describe_emulation(emulation) + suffix)
    return tuple(sentences)
