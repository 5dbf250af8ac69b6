"""The verdicts on a run (correct, complete, quiet), and its failed cases."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from parbench.bench.results.formatting import format_percent
from parbench.bench.results.runs import Run
from parbench.bench.results.stats import median
from parbench.bench.text import pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.run_data import RunData

Level = Literal["good", "doubtful", "bad"]
"""The severity of a verdict, which decides its color."""

MAX_NOISY_SHARE = 0.1
"""A run is quiet if at most this share of its cases, as a fraction, is noisy."""


@dataclass(frozen=True)
class ReportVerdict:
    """A verdict on one aspect of a run: correctness, completeness or noise."""

    word: str
    """The verdict in capitals, such as ``CORRECT``, ``PARTIAL`` or ``NOISY``."""
    level: Level
    """``good``, ``doubtful`` or ``bad``, which decides the color."""
    message: str
    """The reason for the verdict with its counts or percentages: a sentence without a period."""
    hint: str = ""
    """The next action, such as ``Finish: parbench run --resume RUN``. Empty if there is none."""

    @property
    def sentence(self) -> str:
        """The message as a sentence, followed by the hint if there is one."""
        message = f"{self.message[:1].upper()}{self.message[1:]}."
        return f"{message} {self.hint}" if self.hint else message


def judge_run(data: RunData) -> tuple[ReportVerdict, ...]:
    """Return the verdicts on correctness, completeness and noise of a run, in this order.

    The verdict on correctness is left out if no case ran, and the verdict on noise if no case was
    measured.
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
    """Return the verdict on the numerical checks of cases against a reference.

    WRONG: the output of a case differs from the reference. CORRECT: every output that was compared
    matches. UNCHECKED: no output was compared. ``results`` are the cases that ran.
    """
    num_wrong = sum(result.status == "wrong" for result in results)
    if num_wrong:
        message = f"{num_wrong} of {len(results)} results differ from the reference"
        return ReportVerdict("WRONG", "bad", message, hint="Do not use their times")
    num_checked = sum(result.check.passed is not None for result in results)
    suffix = "" if num_checked == len(results) else ", the others are unchecked"
    return ReportVerdict(
        word="CORRECT" if num_checked else "UNCHECKED",
        level="good" if num_checked == len(results) else "doubtful",
        message=f"{num_checked} of {len(results)} results match the reference{suffix}",
    )


def _judge_completeness(data: RunData, measured: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict on missing measurements of a run.

    It is the first of these that applies. BROKEN: a case failed or hung. UNFINISHED: a case has no
    record of a planned repetition. NOTHING MEASURED: no repetition measured a case. PARTIAL: a case
    ran fewer repetitions than planned, because the time budget ended. COMPLETE: otherwise.
    ``measured`` are the cases that at least one repetition measured.
    """
    plan, counts = data.plan, data.status_counts
    resume = f"Finish: parbench run --resume {quote(str(data.run.path))}"
    cases = pluralize(len(plan.cases), "case")
    if counts.get("failed") or counts.get("hang"):
        message = f"{counts.get('failed', 0)} failed and {counts.get('hang', 0)} hung of {cases}"
        return ReportVerdict("BROKEN", "bad", message, hint=f"Logs: {data.run.path / 'logs'}")
    if data.num_missing:
        message = f"{data.num_missing} of {data.num_planned} measurements have no record"
        return ReportVerdict("UNFINISHED", "bad", message, hint=resume)
    if not measured:
        reasons = [skipped.reason for skipped in plan.skipped]
        reasons += [reason for result in data.results for reason in result.reasons]
        message = Counter(reasons).most_common(1)[0][0] if reasons else "the plan has no cases"
        hint = f"{resume} --budget 2m" if message == "out of time" else ""
        return ReportVerdict("NOTHING MEASURED", "bad", message, hint)
    num_cut = sum(
        any(record.is_out_of_budget for record in result.records)
        or (result.status == "ok" and result.repetitions < result.planned)
        for result in data.results
    )
    repetitions = pluralize(plan.repetitions, "repetition")
    if num_cut:
        return ReportVerdict(
            word="PARTIAL",
            level="bad" if data.exit_code == 4 else "doubtful",
            message=f"{num_cut} of {cases} ran fewer than {repetitions} within the time budget",
            hint=f"{resume}, or use a longer --budget",
        )
    num_skipped = len(plan.skipped) + counts.get("skipped", 0)
    suffix = f", and {pluralize(num_skipped, 'case')} cannot run here" if num_skipped else ""
    message = f"{pluralize(len(measured), 'case')} ran {repetitions} each{suffix}"
    return ReportVerdict("COMPLETE", "good", message)


def _judge_noise(run: Run, results: Sequence[CaseResult]) -> ReportVerdict:
    """Return the verdict on the variation between repetitions: NOISE UNKNOWN, QUIET or NOISY.

    The variation of a case is the relative standard deviation of its duration, which needs three
    repetitions. NOISE UNKNOWN: no case has a known variation. NOISY: the variation exceeds 15 % in
    more than 10 % of the cases with a known variation. ``results`` are the measured cases.
    """
    known = [result for result in results if result.variation is not None]
    if not known:
        count = pluralize(max(result.repetitions for result in results), "repetition")
        message = f"the variation between repetitions is unknown ({count})"
        hint = "Import 5 logs" if run.info.plan.is_imported else "Use --repetitions 5"
        return ReportVerdict("NOISE UNKNOWN", "doubtful", message, hint=hint)
    num_noisy = sum(result.noise in ("noisy", "very noisy") for result in known)
    variation = median([result.variation or 0.0 for result in known])
    message = f"the median variation between repetitions is {format_percent(variation)}"
    if num_noisy <= MAX_NOISY_SHARE * len(known):
        return ReportVerdict("QUIET", "good", message)
    message += f", and over 15 % in {num_noisy} of {pluralize(len(known), 'case')}"
    return ReportVerdict("NOISY", "doubtful", message, hint="Find causes: parbench doctor")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row of the table of problems: a case that failed, hung, was wrong, or was not measured."""

    case: str
    """The label of the case, or the name of the benchmark of cases without records."""
    status: str
    """``failed``, ``hang``, ``wrong``, ``skipped`` or ``not measured``."""
    repetitions: str
    """The repetitions with this status, of the planned repetitions, as text.

    ``1/5`` is one of five, and ``all`` stands for a case that the plan skips. For the cases of a
    benchmark without records, it is the sum of their missing repetitions: ``12``.
    """
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

    The ``Problem`` of a benchmark without records has the sum of the missing repetitions of its
    cases, because they have the same reason: the run ended early.
    """
    problems = [
        Problem(case=skipped.case.label, status="skipped", repetitions="all", reason=skipped.reason)
        for skipped in data.plan.skipped
    ]
    problems += [_make_problem(result) for result in data.results if result.status == "skipped"]
    counts: Counter[str] = Counter()
    for missing in data.missing:
        counts[missing.case.name] += missing.repetitions
    reason = "no record, because the run ended early"
    problems += [
        Problem(case=name, status="not measured", repetitions=str(count), reason=reason)
        for name, count in counts.items()
    ]
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


def describe_emulations(run: Run) -> tuple[str, ...]:
    """Return ``emulated: NAME`` for each distinct emulation of nodes or links in a run.

    The result is empty if all nodes and links of the run are real.
    """
    emulations = [run.info.plan.emulation, *(record.emulation for record in run.records)]
    return tuple(f"emulated: {name}" for name in dict.fromkeys(emulations) if name)
