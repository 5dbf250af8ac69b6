"""The driver: makes the repetitions of a run, each in new ranks, and records their outcomes. Without torch."""

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from parbench.bench.launch.attempt import START_SECONDS, Attempt
from parbench.bench.launch.blocks import order_of_visits, spread_over_visits
from parbench.bench.launch.budget import (
    CaseCost,
    CostModel,
    compute_costs,
    group_by_repetition,
    suggest_budget,
)
from parbench.bench.launch.gpu_memory import measure_gpu_memory, wait_for_gpu_memory
from parbench.bench.launch.launchers import Ranks
from parbench.bench.launch.messages import OUT_OF_BUDGET, Job, Outcome
from parbench.bench.launch.recorder import Recorder
from parbench.bench.machine.gpu_inventory import REPORT_VARIABLE
from parbench.bench.machine.host_load import LoadMeter
from parbench.bench.plan.cases import Case
from parbench.bench.plan.plan import Plan, Skipped, case_weight, sampling_seconds
from parbench.bench.results.records import SkipReason
from parbench.bench.results.runs import LaunchInfo, Run, add_launch
from parbench.bench.text import format_duration

DEVICE_VARIABLE = "PARBENCH_DEVICE"
"""Ranks on the CPU leave CUDA alone, even to describe themselves."""
_FAREWELL_SECONDS = 10.0
_GONE_SECONDS = 30.0
"""A driver may take this long to free what a killed process held on a GPU."""
_RETRY_SECONDS = 30.0
"""Enough for ranks on a host that was only busy; a dead one is not waited for as long as at first."""
_PARTIAL_SECONDS = 60.0
"""Partial results are recorded this long after a repetition began, then after twice as long, and so on."""
_CHECK_SECONDS = 0.5
"""Whether the budget suffices is estimated no more often than this, because it takes a look at every case."""
_MAX_NAMED_CASES = 3

StartRanks = Callable[[Path, Mapping[str, str]], Ranks]
"""Starts all ranks with a new folder for their files and additional variables."""


class RunListener(Protocol):
    """Receives the progress of a run."""

    def begin_repetition(self, number: int, total: int, num_cases: int) -> None: ...
    def show_progress(self, case: Case, share: float) -> None: ...
    def print_message(self, message: str) -> None: ...


def remaining(run: Run, *, fills: bool = False) -> tuple[tuple[int, Case], ...]:
    """Return the repetitions and cases without a record; with ``fills`` also those that were out of budget."""
    done = {(record.launch, record.case.id) for record in run.records if not (fills and record.is_out_of_budget)}
    every = itertools.product(range(run.info.plan.launches), run.info.plan.cases)
    return tuple((repetition, case) for repetition, case in every if (repetition, case.id) not in done)


class TimeBudget:
    """Shares the time of a run among its repetitions. The cost of a repetition is known after the first."""

    def __init__(self, seconds: float, costs: CostModel, repetitions: Sequence[list[Case]]) -> None:
        # The last cases may take a little longer rather than be left out after all others were measured.
        overtime = min(0.1 * seconds, 5.0)
        self.costs = costs
        self.repetitions = list(repetitions)
        """The cases of the repetitions to come, including the present one."""
        self.num_made = 0
        self.num_fitting = len(repetitions)
        """The number of repetitions to come for which there is time."""
        self._end = time.monotonic() + seconds
        self._last_end = self._end + overtime

    def seconds_left(self) -> float:
        """Return the time in which cases may begin."""
        return max(self._last_end - time.monotonic(), 0.0)

    def compute_deadline(self, began: float) -> float:
        """Return the end of a repetition that began then: those for which there is time share the rest evenly."""
        costs = self.costs
        if costs.startup_seconds is None:
            costs = CostModel(startup_seconds=time.monotonic() - began)
        num_fitting = costs.count_fitting(self._end - began, self.repetitions)
        return began + (self._end - began) / max(num_fitting, 1)

    def complete_repetition(self) -> bool:
        """Count the present repetition as made; return whether there is time for fewer in total than before."""
        self.repetitions.pop(0)
        self.num_made += 1
        before = self.num_fitting - 1
        left = self.seconds_left()
        self.num_fitting = self.costs.count_fitting(left, self.repetitions) if left else 0
        return self.num_fitting < before

    def progress(self, share: float) -> float:
        """Return the share of the run that is done with this share of the present repetition."""
        return (self.num_made + share) / (self.num_made + self.num_fitting)


@dataclass(kw_only=True)
class Repetition:
    """A repetition in progress: one start of ranks, or several if ranks failed."""

    number: int
    cases: dict[str, Case]
    """The cases without an outcome, by id."""
    costs: list[CaseCost] = field(default_factory=list)
    partial_outcomes: dict[str, tuple[Case, Outcome]] = field(default_factory=dict)
    """The results so far of cases with visits to come, by case id."""
    began: float = 0.0
    """The time at which the first ranks were started that did their job, 0 before that."""
    deadline: float = 0.0
    next_partial: float = 0.0
    """The time at which partial outcomes are recorded again."""
    partial_seconds: float = field(default_factory=lambda: _PARTIAL_SECONDS)
    may_retry: bool = True
    """False if a start has failed, and none has succeeded since."""


class Driver:
    """Measures the pending cases of a run within its time budget."""

    def __init__(
        self,
        run: Run,
        recorder: Recorder,
        start_ranks: StartRanks,
        listener: RunListener,
        *,
        began: float,
        is_one_host: bool = True,
    ) -> None:
        self._path = run.path
        self._plan = run.info.plan
        self._recorder = recorder
        self._start_ranks = start_ranks
        self._listener = listener
        self._num_attempts = len(list((run.path / "logs").glob("attempt-*")))
        self._last_info = began
        """The time up to which repetitions are accounted for in run.json."""
        self._budget = TimeBudget(self._plan.budget_seconds, compute_costs(run), [])
        self._silent_hosts: set[str] = set()
        """Hosts whose ranks did not report when the last ranks hung."""
        self._left_out: dict[str, Case] = {}
        self._needs_gpu_reports = self._plan.device == "cuda" and not is_one_host
        """Whether ranks on other hosts describe the GPUs of their host, which the first ones do."""
        self._has_warned = False
        self._next_warning_check = 0.0

    def drive(self, pending: Sequence[tuple[int, Case]], skipped: Sequence[Skipped] = ()) -> None:
        """Record what the plan skips, and make the repetitions for which there is time."""
        for entry in skipped:
            outcome = Outcome(status="skipped", reason=entry.reason, skip_reason=SkipReason.IMPOSSIBLE)
            self._recorder.write(0, entry.case, outcome)
        repetitions = group_by_repetition(pending)
        numbers = list(repetitions)
        self._budget = TimeBudget(self._plan.budget_seconds, self._budget.costs, list(repetitions.values()))
        budget = self._budget
        while budget.num_fitting:
            number, cases = numbers[budget.num_made], budget.repetitions[0]
            self._listener.begin_repetition(number + 1, self._plan.launches, len(cases))
            failures = self._recorder.failures
            self._record_skipped(number, [case for case in cases if case.id in failures])
            untried = {case.id: case for case in cases if case.id not in failures}
            self._measure(Repetition(number=number, cases=untried))
            fits_fewer = budget.complete_repetition()
            if fits_fewer and budget.costs.case_seconds:
                self._warn_of_missing_repetitions(len(numbers))
        for number, cases in zip(numbers[budget.num_made :], budget.repetitions, strict=True):
            self._record_skipped(number, cases)
        self._report_unmeasured_cases()

    def _record_skipped(self, number: int, cases: Sequence[Case]) -> None:
        """Record that cases are not measured, because they failed before or there is no time."""
        for case in cases:
            failure = self._recorder.failures.get(case.id)
            outcome = OUT_OF_BUDGET
            if failure is not None:
                reason = f"not tried again: {failure.status} in launch {failure.launch + 1} ({failure.reason})"
                outcome = Outcome(status="skipped", reason=reason, skip_reason=SkipReason.EARLIER_FAILURE)
            else:
                self._left_out[case.id] = case
            self._recorder.write(number, case, outcome)

    def _measure(self, repetition: Repetition) -> None:
        """Measure the cases of a repetition; ranks that fail end their case, and new ones measure the rest."""
        try:
            while repetition.cases and self._try(repetition):
                pass
        finally:
            for case, outcome in list(repetition.partial_outcomes.values()):
                self._record(repetition, case, replace(outcome, stop="budget"))
        if repetition.began and any(cost.least_seconds is not None for cost in repetition.costs):
            seconds = time.monotonic() - repetition.began
            self._budget.costs = self._budget.costs.updated(seconds, repetition.costs)

    def _try(self, repetition: Repetition) -> bool:
        """Start ranks and let them measure the cases without an outcome; return whether to go on with new ranks."""
        with self._attempt() as attempt:
            began = time.monotonic()  # the imports of the fork server are not a cost of every repetition
            failure = attempt.wait_for_ranks(_RETRY_SECONDS if self._silent_hosts else START_SECONDS)
            if failure is None:
                repetition.may_retry = True
                self._silent_hosts = set()
                if not repetition.began:
                    repetition.began = began
                    sampling = sampling_seconds(list(repetition.cases.values()), self._plan.measure)
                    deadline = self._budget.compute_deadline(began)
                    repetition.deadline = min(deadline, time.monotonic() + sampling)
                    repetition.next_partial = time.monotonic() + repetition.partial_seconds
                self._recorder.store_environment([attempt.hellos[rank] for rank in sorted(attempt.hellos)])
                self._needs_gpu_reports = False
                job = self._make_job(repetition)
                meter = LoadMeter()
                attempt.send_job(job)
                try:
                    self._follow(repetition, attempt, job)
                finally:
                    self._store_launch_info(repetition.number, attempt, meter)
                return True
        if repetition.may_retry and not self._silent_hosts:
            repetition.may_retry = False
            return True
        if self._silent_hosts:
            hosts = ", ".join(sorted(self._silent_hosts))
            reason = f"{failure.reason}; {hosts} did not answer when the last ranks hung"
            failure = replace(failure, reason=reason)
        for case in list(repetition.cases.values()):
            if case.id not in repetition.partial_outcomes:
                self._record(repetition, case, failure)
        return False

    @contextmanager
    def _attempt(self) -> Iterator[Attempt]:
        """Start all ranks, and end them and what they hold on GPUs, which the next ranks would meet."""
        folder = self._path / "logs" / f"attempt-{self._num_attempts}"
        self._num_attempts += 1
        memory = measure_gpu_memory(self._plan.device)
        variables = {DEVICE_VARIABLE: self._plan.device}
        variables[REPORT_VARIABLE] = "1" if self._needs_gpu_reports else "0"
        ranks = self._start_ranks(folder, variables)
        attempt = Attempt(ranks, folder, self._plan.nproc)
        try:
            yield attempt
        finally:
            attempt.end()
            deadline = time.monotonic() + _GONE_SECONDS
            remains = attempt.list_remaining_processes(_GONE_SECONDS)
            gpus = {hello.place.gpu for hello in attempt.hellos.values() if hello.place and hello.place.gpu}
            remains += wait_for_gpu_memory(memory, gpus, deadline)
            note = f"{_GONE_SECONDS:.0f} s after the ranks before these were ended, there were still"
            self._recorder.cleanup_notes = [f"{note} {', '.join(remains)}"] if remains else []

    def _make_job(self, repetition: Repetition) -> Job:
        cases = list(repetition.cases.values())
        measure = self._plan.measure
        visits, more = order_of_visits(cases, measure.seed, repetition.number, measure.more_visits)
        return Job(
            plan=replace(self._plan, cases=tuple(cases), skipped=()),
            visits=[*visits, *more],
            more=len(more),
            weights=[compute_weight(case, self._recorder.half_widths.get(case.id), self._plan) for case in cases],
            prices=[self._budget.costs.estimate_case(case) for case in cases],
            budget_seconds=max(repetition.deadline - time.monotonic(), 0.0),
            run_seconds=self._budget.seconds_left(),
        )

    def _follow(self, repetition: Repetition, attempt: Attempt, job: Job) -> None:
        """Record each case after its last visit, until the job is done or the ranks fail."""
        weights = spread_over_visits(job, job.weights)
        total_weight = sum(weights)
        done_weight = 0.0
        ended: set[str] = set()
        for number, index in enumerate(job.visits):
            case = job.plan.cases[index]
            share = done_weight / total_weight if total_weight else 1.0
            done_weight += weights[number]
            if case.id in ended:
                continue
            self._listener.show_progress(case, self._budget.progress(share))
            began = time.monotonic()
            outcome = attempt.wait_for_visit(number, self._plan.timeout_seconds)
            if outcome.more:
                repetition.partial_outcomes[case.id] = case, outcome
                self._record_partial_outcomes(repetition)
                continue
            ended.add(case.id)
            if outcome.ranks:
                self._record(repetition, case, replace(outcome, wall_seconds=time.monotonic() - began))
                self._silent_hosts = attempt.find_silent_hosts() if outcome.status == "hang" else set()
                return
            self._record(repetition, case, outcome)
            self._warn_early(repetition, case, job, ended)
        attempt.wait_for_end(_FAREWELL_SECONDS)

    def _record(self, repetition: Repetition, case: Case, outcome: Outcome) -> None:
        record = self._recorder.write(repetition.number, case, outcome)
        repetition.partial_outcomes.pop(case.id, None)
        repetition.cases.pop(case.id, None)
        repetition.costs.append(CaseCost.of(record))
        if record.is_out_of_budget:
            self._left_out[case.id] = case

    def _record_partial_outcomes(self, repetition: Repetition) -> None:
        """Record results so far from time to time, so that a kill of the driver loses little."""
        if time.monotonic() < repetition.next_partial:
            return
        repetition.partial_seconds *= 2
        repetition.next_partial = time.monotonic() + repetition.partial_seconds
        for case, outcome in repetition.partial_outcomes.values():
            self._recorder.write_partial(repetition.number, case, replace(outcome, stop="budget"))

    def _store_launch_info(self, number: int, attempt: Attempt, meter: LoadMeter) -> None:
        """Store how long the ranks took, and the load of their host if all share the driver's."""
        is_here = {hello.host for hello in attempt.hellos.values()} == {socket.gethostname()}
        load = meter.read(attempt.cpu_seconds()) if is_here else None
        now = time.monotonic()
        add_launch(self._path, LaunchInfo(launch=number, seconds=round(now - self._last_info, 3), load=load))
        self._last_info = now

    def _warn_early(self, repetition: Repetition, case: Case, job: Job, ended: set[str]) -> None:
        """Warn once, in the first repetition, that there is no time for all of its cases."""
        is_first = self._budget.costs.startup_seconds is None
        if self._has_warned or not is_first or time.monotonic() < self._next_warning_check:
            return
        self._next_warning_check = time.monotonic() + _CHECK_SECONDS
        known = ended | repetition.partial_outcomes.keys()
        costs = CostModel().updated(time.monotonic() - repetition.began, repetition.costs)
        needed = sum(costs.estimate_case(other) for other in job.plan.cases if other.id not in known)
        if costs.case_seconds and needed > self._budget.seconds_left():
            self._has_warned = True
            seconds = format_duration(repetition.costs[-1].seconds)
            holds = f"hardly holds one launch of {len(self._budget.repetitions[0])} cases"
            self._warn_of_budget(f"{case.label} took {seconds}", holds, suggest_budget(self._plan, costs))

    def _warn_of_missing_repetitions(self, num_wanted: int) -> None:
        budget = self._budget
        num_fitting = budget.num_made + budget.num_fitting
        seconds = format_duration(budget.costs.estimate_repetition(budget.repetitions[0]))
        advice = suggest_budget(self._plan, budget.costs, num_fitting)
        holds = f"holds {num_fitting} of {num_wanted} launches"
        self._warn_of_budget(f"a launch takes about {seconds}", holds, advice)

    def _warn_of_budget(self, observation: str, what_fits: str, advice: str) -> None:
        budget = format_duration(self._plan.budget_seconds)
        message = f"{observation}: the budget of {budget} {what_fits}; --budget {advice} holds all"
        self._listener.print_message(message)

    def _report_unmeasured_cases(self) -> None:
        """Name the cases that no repetition had time for."""
        costs = self._budget.costs
        cases = [case for case in self._left_out.values() if case.id not in costs.case_seconds]
        if not cases or not costs.case_seconds:
            return
        named = cases[:_MAX_NAMED_CASES]
        labels = [f"{case.label} (about {format_duration(costs.estimate_case(case))})" for case in named]
        if len(cases) > len(named):
            labels.append(f"{len(cases) - len(named)} more")
        message = f"no time for {', '.join(labels)}; go on with: parbench run --resume {self._path}"
        self._listener.print_message(message)


def compute_weight(case: Case, half_width: float | None, plan: Plan) -> float:
    """Return a case's share of time: more for steps than for collectives, and for what is not yet precise."""
    weight = case_weight(case)
    if half_width is not None:
        weight *= min(max(half_width / plan.measure.precision, 0.2), 5.0)
    return weight
