"""The driver: makes the repetitions of a run, each in new ranks, and records their results.

The driver is the process of ``parbench run``. It does not import torch. A case is a benchmark with
values for its parameters. A record is the stored result of a case in one repetition. A pending case
has no record yet in the repetition.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from parbench.bench.launch.blocks import make_blocks
from parbench.bench.launch.display import Display
from parbench.bench.launch.messages import OUT_OF_BUDGET, Job, Outcome
from parbench.bench.launch.processes import get_process_space
from parbench.bench.launch.ranks import Ranks
from parbench.bench.launch.recorder import Recorder
from parbench.bench.machine.host_load import LoadMeter
from parbench.bench.plan.cases import Case, group_by_variables
from parbench.bench.plan.plan import compute_sampling_seconds
from parbench.bench.results.records import SkipReason
from parbench.bench.results.runs import RepetitionInfo, Run, add_repetition, utc_now

StartRanks = Callable[[Path, Mapping[str, str]], Ranks]
"""A function that starts all ranks once and returns them.

Its arguments are a new folder for the files of these ranks, and environment variables by name.
"""


Pending = Sequence[tuple[int, Sequence[Case]]]
"""The cases that a run has yet to measure, as a pair for each start of all ranks, in order.

The first element of a pair is the number of the repetition, from 0. The second element is the cases
that these ranks measure, all of which need the same environment variables.
"""


def list_pending(run: Run, *, with_out_of_budget: bool = False) -> Pending:
    """Return the cases of a run that have no record, grouped by the starts of all ranks.

    The result has a pair for each start: the number of the repetition, from 0, and the cases to
    measure. A repetition has a start for each group of cases with the same environment variables.
    Every second repetition has its starts in reverse order, so that a slow drift of the machine
    affects all groups equally.

    If ``with_out_of_budget`` is True, the result also has the cases that an earlier measurement
    skipped because the time budget was over.
    """
    done = set()
    for record in run.records:
        if not (with_out_of_budget and record.is_out_of_budget):
            done.add((record.repetition, record.case.id))
    plan = run.info.plan
    pending: list[tuple[int, Sequence[Case]]] = []
    for number in range(plan.repetitions):
        cases = [case for case in plan.cases if (number, case.id) not in done]
        groups = group_by_variables(cases)
        order = groups[::-1] if number % 2 else groups
        pending += [(number, group) for group in order]
    return pending


Remaining = dict[str, Case]
"""The cases that have no record yet in the current repetition, by id."""


class Driver:
    """Measures the missing cases of a run, repetition by repetition, within the time budget.

    The driver runs in the process of ``parbench run``, which starts the ranks. The starts of all
    ranks that are still to come share the remaining time equally.
    """

    def __init__(
        self, run: Run, recorder: Recorder, start_ranks: StartRanks, display: Display
    ) -> None:
        """Begin the time budget of the run.

        Args:
            run: the run with its plan and the records that it has so far.
            recorder: writes the records.
            start_ranks: starts all ranks once.
            display: shows the progress.
        """
        self._path = run.path
        self._plan = run.info.plan
        self._skipped = () if run.records else self._plan.skipped
        """The cases of the plan that cannot run on these ranks and have no record yet."""
        self._pending = list_pending(run, with_out_of_budget=True)
        self._recorder = recorder
        self._start_ranks = start_ranks
        self._display = display
        self._num_completed = 0
        """The number of entries of ``_pending`` whose cases all have a record."""
        self._last_info = time.monotonic()
        """The end of the last repetition of this driver, at first the start of the driver.

        It is in ``time.monotonic()`` seconds.
        """
        self._end = self._last_info + self._plan.budget_seconds
        """The ``time.monotonic()`` at which the time budget is over."""

    def drive(self) -> None:
        """Record the cases that cannot run, then measure all pending cases for which there is time.

        Cases for which there is no time and cases that failed in an earlier repetition are recorded
        as skipped.
        """
        for entry in self._skipped:
            outcome = Outcome(
                status="skipped", reason=entry.reason, skip_reason=SkipReason.IMPOSSIBLE
            )
            self._display.show_record(self._recorder.write(0, entry.case, outcome))
        for number, cases in self._pending:
            remaining = {case.id: case for case in cases}
            has_time = self._num_completed == 0 or time.monotonic() < self._end
            for case in cases:
                failure = self._recorder.failures.get(case.id)
                if not has_time:
                    self._record(number, remaining, case, OUT_OF_BUDGET)
                elif failure is not None:
                    cause = f"{failure.status} in repetition {failure.repetition + 1}"
                    outcome = Outcome(
                        status="skipped",
                        reason=f"not tried again: {cause} ({failure.reason})",
                        skip_reason=SkipReason.EARLIER_FAILURE,
                    )
                    self._record(number, remaining, case, outcome)
            self._measure(number, remaining)
            self._num_completed += 1

    def _measure(self, number: int, remaining: Remaining) -> None:
        """Measure the remaining cases of a repetition and record the result of each.

        One start of all ranks measures all cases. If ranks fail, new ranks are started to measure
        the remaining cases. If ranks fail to start for the second time, this failure is recorded
        for the remaining cases. ``number`` is the number of the repetition, from 0.
        """
        num_failures = 0
        while remaining:
            failure = self._try(number, remaining)
            if failure is not None:
                num_failures += 1
                if num_failures > 1:
                    for case in list(remaining.values()):
                        self._record(number, remaining, case, failure)

    def _try(self, number: int, remaining: Remaining) -> Outcome | None:
        """Start new ranks, let them measure the remaining cases of a repetition, and end them.

        Returns the failed outcome if the ranks did not start. Otherwise it returns None, also if
        the ranks failed later. ``number`` is the number of the repetition, from 0.
        """
        logs = self._path / "logs"
        folder = logs / f"attempt-{len(list(logs.glob('attempt-*')))}"
        first_case = next(iter(remaining.values()))
        variables = {"PARBENCH_DEVICE": self._plan.device, **first_case.variables}
        ranks = self._start_ranks(folder, variables)
        try:
            failure = ranks.wait_for_start()
            if failure is None:
                self._run_job(number, remaining, ranks)
            return failure
        finally:
            ranks.end()

    def _run_job(self, number: int, remaining: Remaining, ranks: Ranks) -> None:
        """Let started ranks measure their cases, and record the results and the load of the host.

        The load is the CPU time that other processes and the hypervisor use. It is recorded only if
        all ranks are on this host and complete their job. ``number`` is the number of the
        repetition, from 0.
        """
        hellos = [hello for _, hello in sorted(ranks.evidence.hellos.items())]
        self._recorder.store_environment(hellos)
        meter = LoadMeter()
        try:
            self._record_outcomes(number, remaining, ranks)
        finally:
            load = None
            cpu_seconds = ranks.evidence.cpu_seconds
            is_here = {hello.process_space for hello in hellos} == {get_process_space()}
            if is_here and len(cpu_seconds) == len(hellos):
                load = meter.read(sum(cpu_seconds.values()))
            now = time.monotonic()
            info = RepetitionInfo(repetition=number, seconds=now - self._last_info, load=load)
            self._last_info = now
            add_repetition(self._path, info)

    def _record_outcomes(self, number: int, remaining: Remaining, ranks: Ranks) -> None:
        """Let started ranks measure the remaining cases, and record each case when it is complete.

        Returns when all cases are recorded, or when the ranks fail. A failure is recorded for the
        case whose block of samples did not end. ``number`` is the number of the repetition, from 0.
        """
        cases = tuple(remaining.values())
        job = self._make_job(number, cases)
        ranks.send_job(job)
        starts: dict[str, str] = {}
        for position, index in enumerate(job.blocks):
            case = cases[index]
            if case.id not in remaining:
                continue
            title = f"repetition {number + 1}/{self._plan.repetitions}: {case.name}"
            num_completed = self._num_completed + position / len(job.blocks)
            self._display.show_progress(title, num_completed / len(self._pending))
            starts.setdefault(case.id, utc_now())
            began = time.monotonic()
            outcome = replace(ranks.wait_for_block(), started=starts[case.id])
            if outcome.ranks:
                outcome = replace(outcome, wall_seconds=time.monotonic() - began)
                self._record(number, remaining, case, outcome)
                return
            if not outcome.more:
                self._record(number, remaining, case, outcome)
        ranks.wait_for_end()

    def _make_job(self, number: int, cases: tuple[Case, ...]) -> Job:
        """Return the job of ranks that measure ``cases`` in the repetition ``number``, from 0.

        Its time is an equal part of the time that remains of the budget for all starts of ranks.
        """
        plan = self._plan
        remaining_seconds = self._end - time.monotonic()
        share_seconds = remaining_seconds / (len(self._pending) - self._num_completed)
        budget_seconds = min(share_seconds, compute_sampling_seconds(cases, plan.measure))
        return Job(
            plan=replace(plan, cases=cases, skipped=()),
            blocks=make_blocks(cases, seed=f"{plan.measure.seed} {number}"),
            budget_seconds=max(budget_seconds, 0.0),
            # The last cases may take a little longer rather than be left out after all others.
            run_seconds=max(remaining_seconds + 0.1 * plan.budget_seconds, 0.0),
        )

    def _record(self, number: int, remaining: Remaining, case: Case, outcome: Outcome) -> None:
        """Write the record of a case, and remove the case from the cases that remain to measure.

        ``number`` is the number of the repetition, from 0.
        """
        self._display.show_record(self._recorder.write(number, case, outcome))
        del remaining[case.id]
