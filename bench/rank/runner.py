"""The measurement of one case on the ranks: prepare, check, warm up, time and check again.

A case is a benchmark with values for its parameters. Its samples may be split into blocks, between
which the ranks measure other cases. To explain a step is to profile it and to break its time down
into computation, communication and idle time.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from msgspec.structs import replace

from parbench.bench.launch.messages import Outcome
from parbench.bench.operations.local import background_load
from parbench.bench.plan.cases import EXPLAINER, Case, load_target
from parbench.bench.plan.catalogue import NO_LOAD, RUNNER_PARAMS
from parbench.bench.plan.plan import FaultSpec, Measure
from parbench.bench.rank.device_timer import DeviceTimer
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.result import add_samples
from parbench.bench.rank.timing import CaseTimer, Stopwatch, make_sampler
from parbench.bench.results.records import Check, SkipReason, Status, encode_timeline
from parbench.bench.text import UserError, pluralize
from parbench.bench.world import accelerator
from parbench.bench.world.benchmark import (
    Benchmark,
    Description,
    SupportsDifferences,
    SupportsExplanation,
)
from parbench.bench.world.world import IdleBenchmark, World, select_subgroup

_MAX_NAMED_DIFFERENCES = 3
"""The largest number of wrong results that an error message describes."""
_EXPLAINED_SHARE = 0.6
"""The fraction of a case's time for preparation and samples, if a step is profiled too.

The rest of the time is for the profiled steps.
"""


def inject_fault(benchmark: Benchmark, fault: FaultSpec, sync: Callable[[], None]) -> None:
    """Replace ``step`` of a benchmark by a step with the fault ``slow`` or ``corrupt``.

    The new step first runs the old one. With ``slow``, the new step then sleeps for a fraction
    (``fault.amount``) of the time that the old step took. With ``corrupt``, it then calls the
    benchmark's method ``corrupt``, which changes the result.

    ``sync`` is a function that waits until the device has done the launched work. Raises
    ``UserError`` if the fault is ``corrupt`` and the benchmark has no method ``corrupt``.
    """
    step = benchmark.step
    corrupt = getattr(benchmark, "corrupt", None)
    if fault.kind == "corrupt" and corrupt is None:
        raise UserError(f"--inject {fault.text}: this benchmark has no corrupt()")

    def step_with_fault() -> None:
        """Run the original step, then corrupt its result or sleep in proportion to its time."""
        began = time.perf_counter()
        step()
        if corrupt is not None and fault.kind == "corrupt":
            corrupt()
        else:
            sync()  # the delay is a share of the step, not only of its launch
            time.sleep(fault.amount * (time.perf_counter() - began))

    object.__setattr__(benchmark, "step", step_with_fault)  # also if it is a frozen dataclass


class CaseEndedError(Exception):
    """Ends a case on all ranks at the same point, without a measurement.

    ``outcome`` is the outcome of the case, with a status such as ``skipped`` or ``wrong`` and the
    reason.
    """

    def __init__(self, status: Status, reason: str, **fields: Any) -> None:
        """Make the outcome of the ended case from its status, its reason and other fields.

        ``fields`` are fields of ``Outcome`` by name, such as ``skip_reason``.
        """
        super().__init__(reason)
        self.outcome = Outcome(status=status, reason=reason, **fields)


class CaseRun:
    """The measurement of one case, a benchmark with values for its parameters, on this rank.

    The samples are taken in one block, or in several with blocks of other cases between them. All
    ranks of the run call each method at the same point, because they communicate.
    """

    def __init__(
        self,
        case: Case,
        world: World,
        measure: Measure,
        progress: Progress,
        fault: FaultSpec | None,
    ) -> None:
        """Store the settings. The first block prepares the benchmark.

        Args:
            case: the benchmark to measure with its parameters.
            world: all ranks of the run.
            measure: the limits on samples and the required precision.
            progress: the position in the case, for the watchdog.
            fault: the fault of ``--inject``, also if it affects another rank. None without a
                fault.
        """
        self._case = case
        self._world = world
        self._measure = measure
        self._progress = progress
        self._fault = fault
        self._mode = str(case.all_params.get("mode", "blocking"))
        self._load = str(case.all_params.get("background", NO_LOAD))
        self._resources = ExitStack()
        self._wall_seconds = 0.0
        """The seconds that the blocks of the case have taken so far, for ``Record.seconds``."""
        self._is_prepared = False
        # Set by the preparation:
        self._timer: CaseTimer
        self._description: Description
        self._ranks: tuple[int, ...] = ()
        """The global ranks that are measured, a subset of all ranks for a case on a group."""
        self._has_check = False
        """True if the benchmark of any rank compares its results with a reference."""
        self._can_explain = False
        """True if all ranks can explain a step, and no fault makes steps slow or wrong."""

    def run_block(self, seconds: float, num_later: int = 0, *, is_only: bool = True) -> Outcome:
        """Measure one block of about ``seconds`` and return the outcome of all blocks so far.

        A block is a run of samples of this case. The first block also prepares the benchmark. If
        the case fails or is complete, the outcome's field ``more`` is False. Only rank 0's outcome
        has samples and metrics.

        Args:
            seconds: the time for this block, with preparation and checks.
            num_later: the number of further blocks that are planned for the case.
            is_only: True if the case has a single block. It is then measured until the median is
                precise enough, and a step is profiled if the benchmark can break its time down.
        """
        began = time.perf_counter()
        try:
            if not self._is_prepared:
                self._prepare()
            outcome = self._measure_block(began, seconds, num_later, is_only)
        except CaseEndedError as end:
            outcome = end.outcome
        if not outcome.more:
            self._resources.close()
        self._wall_seconds += time.perf_counter() - began
        return replace(outcome, wall_seconds=self._wall_seconds)

    def _prepare(self) -> None:
        """Make the benchmark on this rank and check the result of its first step.

        Raises ``CaseEndedError`` on all ranks if the case cannot run on a rank or a result is
        wrong.
        """
        world = self._world
        self._progress.phase = "prepare"
        self._progress.steps = 0
        subgroup = benchmark = refusal = None
        try:
            subgroup = select_subgroup(world, self._case.all_params)
            benchmark = make_benchmark(self._case, subgroup.world, self._fault)
            self._resources.callback(benchmark.close)
        except UserError as error:
            refusal = str(error)
        if world.is_any_true(benchmark is None):
            refusals = world.gather(refusal)
            active = range(len(refusals)) if subgroup is None else subgroup.active
            reasons = {refusals[rank] for rank in active}
            if len(reasons) > 1:
                states = "; ".join(f"rank {rank}: {refusals[rank] or 'ready'}" for rank in active)
                raise CaseEndedError("failed", f"ranks disagree whether this can run: {states}")
            reason = str(reasons.pop())
            raise CaseEndedError("skipped", reason, skip_reason=SkipReason.IMPOSSIBLE)
        assert benchmark is not None
        assert subgroup is not None
        fault = self._fault
        if self._case.is_custom and not isinstance(benchmark, SupportsExplanation):
            benchmark = load_target(EXPLAINER)(world, benchmark)
        has_slow_or_wrong_steps = fault is not None and fault.kind != "late"
        cannot_explain = has_slow_or_wrong_steps or not isinstance(benchmark, SupportsExplanation)
        self._can_explain = not world.is_any_true(cannot_explain)
        self._ranks = subgroup.ranks
        check = getattr(benchmark.check, "__func__", None)
        self._has_check = world.is_any_true(check is not Benchmark.check)
        late_seconds = 0.0
        if fault is not None and (fault.kind, fault.rank) == ("late", world.global_rank):
            late_seconds = fault.amount
        timer = None
        if world.device.type == "cuda":
            timer = DeviceTimer(world, spins=self._mode != "async" and late_seconds == 0)
        stopwatch = Stopwatch(
            benchmark=benchmark,
            world=world,
            progress=self._progress,
            late_seconds=late_seconds,
            has_load=self._load != NO_LOAD,
            timer=timer,
        )
        self._timer = CaseTimer(stopwatch, self._measure, subgroup, self._mode)
        self._resources.callback(self._timer.close)
        self._description = world.gather(benchmark.describe())[self._ranks[0]]
        self._check_first_step(benchmark)
        self._is_prepared = True

    def _check_first_step(self, benchmark: Benchmark) -> None:
        """Check the result of an untimed step and, in mode graph, of an untimed graph replay.

        Raises ``CaseEndedError`` with status wrong if a result is wrong, and with status skipped if
        the fault of ``--inject`` has no effect on this case.
        """
        self._check("before the timed iterations", benchmark.step)
        fault = self._fault
        if fault is not None:
            can_slow = fault.kind != "slow" or self._mode not in ("async", "graph")
            if fault.kind == "corrupt" or not can_slow or fault.rank not in self._ranks:
                reason = f"--inject {fault.text} has no effect in this case"
                raise CaseEndedError("skipped", reason, skip_reason=SkipReason.IMPOSSIBLE)
        if self._mode == "graph":
            replay = make_sampler("graph", benchmark, 1)
            self._check("of a replay before the timed iterations", replay)
        if self._load != NO_LOAD:
            # CUDA may wait for an idle device to load a kernel, and none is idle during a load.
            self._timer.stopwatch.start_line(1)

    def _measure_block(
        self, began: float, seconds: float, num_later: int, is_only: bool
    ) -> Outcome:
        """Measure one block, check the results and return the outcome of all blocks so far.

        A block is a run of samples of this case. If it is the only one and all ranks can break down
        the time of a step, a step is profiled too.

        Args:
            began: the ``time.perf_counter()`` at which the block began.
            seconds: the time for the block from ``began`` on.
            num_later: the number of further blocks that are planned for the case.
            is_only: True if the case has a single block.
        """
        timing = self._timer
        explains = is_only and self._can_explain
        seconds_to_measure = seconds
        if explains:
            # Such a benchmark is a step, whose preparation takes a considerable part of the time.
            seconds_to_measure = _EXPLAINED_SHARE * seconds - (time.perf_counter() - began)
        seconds_to_measure = max(seconds_to_measure, 0.0)
        with background_load(self._load, self._world):
            if is_only:
                timing.measure_until_precise(seconds_to_measure)
            else:
                timing.measure_block(seconds_to_measure, num_later)
        step = None
        if timing.takes_many_steps:
            mode = "graph" if self._mode == "graph" else "blocking"
            step = make_sampler(mode, timing.stopwatch.benchmark, 1)
        self._check("after the timed iterations", step)
        outcome = Outcome(
            status="ok",
            check=Check(passed=True, wrong=0) if self._has_check else Check(),
            more=num_later > 0 and not timing.is_complete,
        )
        if self._world.global_rank == 0:
            ranks = list(self._ranks)
            outcome = add_samples(outcome, timing.samples, self._description, self._world, ranks)
        if explains:
            outcome = self._explain(outcome, seconds - (time.perf_counter() - began))
        return outcome

    def _check(self, when: str, step: Callable[[], object] | None = None) -> None:
        """Compare the results of a step on all ranks with the reference.

        Raises ``CaseEndedError`` with status wrong on all ranks if a result of any rank is wrong.

        Args:
            when: a phrase for the error message, such as ``before the timed iterations``.
            step: a function that takes a new step whose results are compared, None to compare the
                results of the step that was taken last.
        """
        self._progress.phase = "check"
        if step is not None:
            self._timer.stopwatch.start_line()
            step()
            self._world.sync()
        benchmark = self._timer.stopwatch.benchmark
        num_wrong = benchmark.check()
        differences = benchmark.differences() if isinstance(benchmark, SupportsDifferences) else ()
        if not self._world.is_any_true(num_wrong > 0):
            return
        results = self._world.gather((num_wrong, differences))
        wrong_by_rank = {rank: num for rank, (num, _) in enumerate(results) if num}
        counts = ", ".join(
            f"{pluralize(num, 'wrong value')} on rank {rank}" for rank, num in wrong_by_rank.items()
        )
        reasons = [f"results differ from the reference in the check {when}: {counts}"]
        phrases = list(dict.fromkeys(phrase for _, phrases in results for phrase in phrases))
        reasons += phrases[:_MAX_NAMED_DIFFERENCES]
        raise CaseEndedError(
            "wrong",
            "; ".join(reasons),
            check=Check(passed=False, wrong=sum(wrong_by_rank.values())),
            wrong_by_rank=wrong_by_rank,
        )

    def _explain(self, outcome: Outcome, seconds: float) -> Outcome:
        """Profile steps for at most ``seconds``, and add the breakdown of a step to the outcome."""
        self._progress.phase = "explain"
        [remaining_seconds] = self._world.broadcast_from_rank_0([max(seconds, 0.0)])
        stopwatch = self._timer.stopwatch
        benchmark = cast(SupportsExplanation, stopwatch.benchmark)
        explanation = benchmark.explain_step(stopwatch.start_line, remaining_seconds)
        timeline = explanation.timeline
        return replace(
            outcome,
            metrics={**outcome.metrics, **explanation.metrics},
            details={**outcome.details, **explanation.details},
            notes=[*outcome.notes, *explanation.notes],
            timeline=b"" if timeline is None else encode_timeline(timeline),
        )


def make_benchmark(case: Case, world: World | None, fault: FaultSpec | None) -> Benchmark:
    """Prepare the benchmark of a case on this rank and return it.

    Raises ``TypeError`` if the target of the case returns something else than a benchmark.

    Args:
        case: the target, which is the function that makes the benchmark, and its parameters.
        world: the ranks of this rank's group in the case. If this rank takes no steps in the case,
            it is None, and the result is an ``IdleBenchmark``.
        fault: the fault of ``--inject``, None without a fault. If it slows or corrupts the steps of
            this rank, the returned benchmark has the fault.
    """
    if world is None:
        return IdleBenchmark()
    not_passed = {*RUNNER_PARAMS, *case.variables}
    params = {name: value for name, value in case.all_params.items() if name not in not_passed}
    if world.backend == "nccl" and case.kind in ("collective", "p2p"):
        capability = accelerator.get_capability(world.device)
        refuse_float8(str(params.get("dtype")), capability)
    benchmark = load_target(case.target)(world, **params)
    if not isinstance(benchmark, Benchmark):
        raise TypeError(f"target {case.target!r} returned {benchmark!r}, which is not a benchmark")
    if fault is not None and fault.kind != "late" and fault.rank == world.global_rank:
        inject_fault(benchmark, fault, world.sync_stream)
    return benchmark


def refuse_float8(dtype: str, capability: tuple[int, int]) -> None:
    """Raise ``UserError`` for a float8 type on a GPU below compute capability 9.0.

    On such a GPU, NCCL would end the process. ``dtype`` is the name of a data type, such as
    ``float32``. ``capability`` is the compute capability (major, minor) of the GPU.
    """
    if dtype.startswith("float8") and capability < (9, 0):
        raise UserError(f"nccl carries {dtype} only from compute capability 9.0 on")
