"""The progress of a point (a run of a sweep), as its run folder shows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parbench.bench.launch.driver import list_pending
from parbench.bench.results.records import Record
from parbench.bench.results.runs import list_runs, load_run
from parbench.bench.text import UserError
from parbench.slurm.sweep.folder import make_runs_path

ABANDONED = "abandoned"
"""The name of the folder for runs that are not resumed, next to the other runs of the point."""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """The progress of a point, which is one run of a sweep with one value per setting.

    The progress is counted in measurements. A measurement is one case in one repetition.
    """

    run: Path | None = None
    """The folder of the point's last run, None if the point has no run.

    If the run cannot be read, the path is the folder of all runs of the point.
    """
    planned: int = 0
    """The number of measurements that the complete run has, 0 without a run."""
    measured: int = 0
    """The number of measurements that the run has now, failed and skipped ones included."""
    failures: tuple[Record, ...] = ()
    """The failed records of the run: wrong results first, then hangs, then errors."""
    problem: str = ""
    """The reason why the run cannot be read now, empty if it can be read."""

    @property
    def state(self) -> Literal["absent", "partial", "complete"]:
        """``absent`` without a run, ``partial`` if measurements are missing, or ``complete``."""
        if self.run is None:
            return "absent"
        return "complete" if 0 < self.planned == self.measured else "partial"

    @property
    def is_complete(self) -> bool:
        """True if the point's run has all of its measurements, failed ones included."""
        return self.state == "complete"

    @property
    def not_done_reason(self) -> str:
        """The reason why the point is not done, as text.

        It is a reading error, the first failure, or the number of missing measurements. A point is
        done if its run is complete and has no failures. The text is empty if the point is done or
        has no run.
        """
        if self.problem:
            return self.problem
        if self.failures:
            first = self.failures[0]
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            return f"{first.status}: {first.case.label}: {first.reason}{more}"
        if self.run is None or self.is_complete:
            return ""
        return f"{self.planned - self.measured} of {self.planned} measurements are missing"


def read_progress(folder: Path, point_id: str) -> SweepProgress:
    """Return the progress of the last run of a point of the sweep in ``folder``.

    A point is one run of the sweep, which several jobs may continue. A reading error is not raised.
    It is returned as ``problem``, because it may be temporary on a network file system.
    """
    runs_folder = make_runs_path(folder, point_id)
    try:
        runs = list_runs(runs_folder)
        if not runs:
            return SweepProgress()
        run = load_run(runs[-1])
    except (UserError, OSError) as error:
        return SweepProgress(run=runs_folder, problem=str(error))
    planned = len(run.info.plan.cases) * run.info.plan.repetitions
    failures = []
    for status in ("wrong", "hang", "failed"):
        failures += [record for record in run.records if record.status == status]
    return SweepProgress(
        run=run.path,
        planned=planned,
        measured=planned - sum(len(cases) for _, cases in list_pending(run)),
        failures=tuple(failures),
    )
