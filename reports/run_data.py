"""The data of one run for reports: loaded and summarized once per command."""

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import Status
from parbench.bench.results.runs import Run, load_run
from parbench.reports.analysis.case_results import (
    WORST_FIRST,
    CaseResult,
    MissingCase,
    compute_exit_code,
    find_missing,
    is_conclusive,
    merge_records,
)
from parbench.reports.analysis.fits import Ceiling, OperationCurve, find_ceiling, fit_curves
from parbench.reports.analysis.labels import label_cases
from parbench.reports.analysis.timelines import StepTimeline, load_step_timelines
from parbench.reports.analysis.topology import Topology, read_topology
from parbench.reports.frames import build_cases_frame
from parbench.reports.sweeps import MeasuredPoint

if TYPE_CHECKING:
    import pandas as pd


class RunData:
    """A run with the merged results of its cases, and values derived from them for reports.

    ``results`` is computed by the constructor, all other attributes when they are first used.
    """

    def __init__(self, run: Run, point: MeasuredPoint | None = None) -> None:
        """Merge the records of a run into one result per case.

        ``point`` is the sweep point (one combination of settings) that the run measured.
        """
        self.run = run
        self.point = point
        """The sweep point that the run measured, None outside a sweep."""
        self.results: tuple[CaseResult, ...] = merge_records(run)
        """One result for each case with a record, in the order of the plan."""

    @classmethod
    def load(cls, path: Path) -> "RunData":
        """Read the run in a folder. Raises ``UserError`` if it is not the folder of a run."""
        return cls(load_run(path))

    @property
    def plan(self) -> Plan:
        """The cases, the repetitions, the ranks and the limits that were planned for the run."""
        return self.run.info.plan

    @cached_property
    def cases(self) -> "pd.DataFrame":
        """One row for each result, in the order of the plan.

        Numbers are in seconds, bytes and bytes per second. An unknown number is NaN or NA, an
        unknown text None. ``frames.list_rows(frame)`` returns the rows of a table.

        * ``case_id``, ``name`` (``collective.all_reduce``), ``label`` (``all_reduce 1M blocking
          float32``, ``fsdp layers=4``), ``kind`` (``collective``, ``p2p``, ``memory``,
          ``workload``, ...), ``is_communication``.
        * ``status`` (the worst of a repetition), ``reason``.
        * ``repetitions`` that measured the case, ``planned`` repetitions, ``iterations`` of all
          repetitions.
        * ``variation``: relative standard deviation of the duration between repetitions, unknown
          below three repetitions. ``noise``: the grade of this variation (``stable`` to ``very
          noisy``), or of the variation between iterations if there is only one repetition.
        * ``stop`` (``precision x4, budget``), ``check`` (``ok``, ``unchecked``, ``3 wrong``),
          ``kernel`` (of NCCL, ``AllReduce_Sum_f32_RING_LL<<<24,544>>>``).
        * ``world_size``, ``num_ranks`` (of the group), ``nodes``, ``backend``, ``device``.
        * ``headline``: the metric that is the duration, ``time`` or ``step_time``. ``seconds``,
          ``seconds_low`` and ``seconds_high`` are its value and its 95 % interval.
        * ``param_NAME`` for every parameter. Integers are Int64.
        * ``METRIC``, ``METRIC_low`` and ``METRIC_high`` for every metric, such as ``busbw`` or
          ``exposed_comm.dp``. Unknown if a result was wrong. Intervals are over repetitions, so a
          metric of one repetition has none.
        * ``result``: the ``CaseResult``, with details, notes and records.
        """
        return build_cases_frame(self.results, self.labels)

    @cached_property
    def labels(self) -> dict[str, str]:
        """The short label of each case for tables, such as ``fsdp layers=4``, keyed by case id."""
        return label_cases(self.results)

    @cached_property
    def measured(self) -> tuple[CaseResult, ...]:
        """The results that have metrics: a repetition measured the case, and none was wrong."""
        return tuple(result for result in self.results if result.metrics)

    @cached_property
    def steps(self) -> tuple[CaseResult, ...]:
        """The measured results that are training steps or custom benchmarks."""
        return tuple(result for result in self.measured if not result.is_communication)

    @cached_property
    def communication(self) -> tuple[CaseResult, ...]:
        """The measured results of communication benchmarks, without the pairs of ``p2p.matrix``."""
        return tuple(
            result
            for result in self.measured
            if result.is_communication and result.case.name != "p2p.matrix"
        )

    @cached_property
    def missing(self) -> tuple[MissingCase, ...]:
        """The planned cases that have no record in at least one repetition."""
        return find_missing(self.run)

    @property
    def num_missing(self) -> int:
        """The number of planned measurements (pairs of case and repetition) that have no record."""
        return sum(case.repetitions for case in self.missing)

    @property
    def num_planned(self) -> int:
        """The number of planned measurements: the number of cases times the repetitions."""
        return len(self.plan.cases) * self.plan.repetitions

    @cached_property
    def status_counts(self) -> dict[Status, int]:
        """The number of cases with each status, in the order from ok to wrong.

        Statuses that no case has are left out.
        """
        counts = Counter(result.status for result in self.results)
        return {status: counts[status] for status in reversed(WORST_FIRST) if counts[status]}

    @cached_property
    def exit_code(self) -> int:
        """The exit code of the run: 1 for a wrong result, 4 if something did not run, otherwise 0.

        "Did not run" means that a case failed or hung, that a planned measurement has no record, or
        that the time budget left too few repetitions (``is_conclusive``).
        """
        is_complete = not self.missing and is_conclusive(self.run, self.results)
        return compute_exit_code(self.status_counts, is_complete=is_complete)

    @cached_property
    def ceiling(self) -> Ceiling | None:
        """The bandwidth limit with which bus bandwidth is compared, None if it is unknown."""
        return find_ceiling(self.run, self.measured)

    @cached_property
    def curves(self) -> tuple[OperationCurve, ...]:
        """The fits of time over size, one for each operation that was measured at enough sizes."""
        return fit_curves(self.communication, self.ceiling)

    @cached_property
    def nodes(self) -> Topology | None:
        """The hosts of the ranks, None if all are on one host or the hosts are unknown."""
        return read_topology(self.run)

    @cached_property
    def timelines(self) -> tuple[StepTimeline, ...]:
        """The timelines of profiled steps, one per step, from files in the folder of the run."""
        return load_step_timelines(self.run, self.steps)
