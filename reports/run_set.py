"""Several runs for a report: their cases in one frame, their differences, and their verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.results.runs import Run
from parbench.bench.text import format_list, pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.labels import PAIRS, flatten, label_cases, list_environment_facts
from parbench.reports.analysis.topology import ONE_RANK_PER_NODE
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.frames import build_cases_frame
from parbench.reports.run_data import RunData
from parbench.reports.sweeps import MeasuredPoint, load_runs

if TYPE_CHECKING:
    import pandas as pd

_IDENTITIES = ("boot_id", "job", "SLURM_JOB_ID")
"""Facts that differ between any two runs."""
_CIRCUMSTANCES = ("one_minute", "nodelist", "SLURM_JOB_NODELIST")
"""Facts that nobody sets, but that may explain a difference in time."""
_UNKNOWN_DISTRIBUTION = "distribution unknown"


@dataclass(frozen=True, kw_only=True)
class NumberedRun:
    """A run with its number in tables, and the point of a sweep that it measured."""

    number: int
    data: RunData
    point: MeasuredPoint | None

    @property
    def name(self) -> str:
        """The name of the run in tables, such as ``run 1``."""
        return f"run {self.number}"

    @property
    def environment(self) -> str:
        """The environment of the point of a sweep, empty without one."""
        return self.point.environment if self.point else ""

    @property
    def num_nodes(self) -> int:
        """The number of nodes, by the plan if no case has a record."""
        spread = self.data.plan.spread
        planned = spread.nodes if spread else 1
        return max([planned, *(result.world.nodes for result in self.data.results)])

    def get_distribution(self, result: CaseResult) -> str:
        """Return the distribution of ranks on nodes, empty if only one is possible."""
        nodes = result.world.nodes
        distribution = self.point.distribution if self.point else ""
        if self.data.nodes:
            distribution = self.data.nodes.distribution
        if nodes < 2 or result.world.size <= nodes or distribution == ONE_RANK_PER_NODE:
            return ""
        return distribution or _UNKNOWN_DISTRIBUTION


class RunSet:
    """Runs in the order in which they were given, numbered from 1.

    ``missing`` has a sentence for each run of a sweep that is absent or cannot be read.
    """

    def __init__(
        self, runs: Sequence[tuple[Run, MeasuredPoint | None]], missing: Sequence[str] = ()
    ) -> None:
        self.missing = tuple(missing)
        self.runs = tuple(
            NumberedRun(number=number, data=RunData(run), point=point)
            for number, (run, point) in enumerate(runs, start=1)
        )

    @classmethod
    def load(cls, folders: Sequence[Path], *, is_strict: bool = True) -> "RunSet":
        """Load the runs in these folders. Raises as ``load_runs``."""
        return cls(*load_runs(folders, is_strict=is_strict))

    @cached_property
    def current_runs(self) -> tuple[NumberedRun, ...]:
        """The runs whose point was not measured again later."""
        last_numbers = {run.point.id: run.number for run in self.runs if run.point}
        return tuple(
            run for run in self.runs if not run.point or last_numbers[run.point.id] == run.number
        )

    @cached_property
    def cases(self) -> "pd.DataFrame":
        """The measured cases of all runs: the columns of ``RunData.cases``, and these.

        * ``run``: the number of the run. ``is_current``: its point was not measured again later.
        * ``match``: the name and the parameters of the case, without those that vary by run.
        * ``is_whole_world``: all ranks took part.
        * ``ranks_per_node``, ``distribution`` and ``environment``, empty if there is only one.
        * ``scaling_value``: bus bandwidth of communication, otherwise the time of a step.
          ``rate``: bus bandwidth, otherwise tokens or steps per second.
        """
        import pandas as pd

        measured = [(run, result) for run in self.runs for result in run.data.measured]
        results = [result for _, result in measured]
        extra = pd.DataFrame([self._describe_case(run, result) for run, result in measured])
        return build_cases_frame(results, label_cases(results)).join(extra)

    def _describe_case(self, run: NumberedRun, result: CaseResult) -> dict[str, object]:
        """Return the values of a case in the columns that ``RunData.cases`` lacks."""
        case, world = result.case, result.world
        params = [
            f"{name}={value}"
            for name, value in case.params.items()
            if (case.name, name) not in self.varied_params
        ]
        value = rate = result.value("busbw")
        if not result.is_communication:
            value = result.seconds
            rate = result.value("tokens_per_second") or (1 / value if value else None)
        return {
            "run": run.number,
            "is_current": run in self.current_runs,
            "match": " ".join([case.name, case.target, *sorted(params)]),
            "is_whole_world": "group" not in case.params,
            "ranks_per_node": world.size / world.nodes if world.nodes else 0.0,
            "distribution": run.get_distribution(result),
            "environment": run.environment,
            "scaling_value": value,
            "rate": rate,
        }

    @cached_property
    def varied_params(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The value in each run of every parameter that differs only between runs.

        Keys are the name of the case and the name of the parameter.
        """
        values: dict[tuple[str, str], dict[int, set[str]]] = {}
        for run in self.runs:
            for result in run.data.results:
                for name, value in result.case.params.items():
                    by_run = values.setdefault((result.case.name, name), {})
                    by_run.setdefault(run.number, set()).add(str(value))
        varied = {}
        for key, by_run in values.items():
            texts = [text for run_texts in by_run.values() for text in run_texts]
            if len(by_run) == len(texts) == len(self.runs) and len(set(texts)) > 1:
                varied[key] = tuple(texts)
        return varied

    @cached_property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """The facts and parameters that differ between runs, each with its text in every run."""
        facts = [_list_facts(run.data.run) for run in self.runs]
        names = dict.fromkeys(name for run_facts in facts for name in run_facts)
        texts = {name: tuple(run_facts.get(name, UNKNOWN) for run_facts in facts) for name in names}
        for (case_name, param), values in self.varied_params.items():
            texts[f"{case_name} {param}"] = values
        return {name: values for name, values in texts.items() if len(set(values)) > 1}

    def describe_differences(self) -> str:
        """Return a sentence about the settings that differ between the runs."""
        settings = [
            name
            for name in self.differences
            if _get_last_part(name) not in _CIRCUMSTANCES
            and not _get_last_part(name).startswith(PAIRS)
        ]
        if not settings:
            return "All runs have the same settings."
        if len(settings) == 1:
            values = ", ".join(self.differences[settings[0]])
            return f"Runs differ in one setting: {settings[0]} ({values})."
        return (
            f"Runs differ in {len(settings)} settings, so differences in time have no single cause."
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the current runs, and of missing runs."""
        codes = [run.data.exit_code for run in self.current_runs]
        if self.missing:
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> ReportVerdict:
        """The verdict on the current runs: FAILED, INCOMPLETE or PASSED."""
        failed = [str(run.number) for run in self.current_runs if run.data.exit_code]
        total = pluralize(len(self.current_runs), "run")
        num_missing = len(self.missing)
        missing = f", {pluralize(num_missing, 'run')} missing" if num_missing else ""
        if failed:
            names = f"run {format_list(failed, 'and')}"
            message = f"{len(failed)} of {total} failed ({names}){missing}"
            return ReportVerdict("FAILED", "bad", message)
        message = f"{len(self.current_runs)} of {total} passed{missing}"
        if missing:
            return ReportVerdict("INCOMPLETE", "bad", message)
        return ReportVerdict("PASSED", "good", message)


def _list_facts(run: Run) -> dict[str, str]:
    """Return the settings and the environment of a run as texts, keyed by dotted name."""
    plan = run.info.plan
    settings = {
        "plan": {
            "preset": plan.preset,
            "nproc": plan.nproc,
            "backend": plan.backend,
            "device": plan.device,
            "repetitions": plan.repetitions,
            "notes": plan.notes,
        },
        "host": run.info.host,
        "parbench": run.info.parbench,
    }
    facts = dict(flatten(settings))
    for name, text in list_environment_facts(run.info.environment or {}):
        facts[f"environment.{name}"] = text
    return {name: text for name, text in facts.items() if _get_last_part(name) not in _IDENTITIES}


def _get_last_part(name: str) -> str:
    """Return the part of a dotted name after the last dot."""
    return name.rpartition(".")[2]
