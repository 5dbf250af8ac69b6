"""Several runs for a report: their cases in one frame, their differences, and their verdict."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from parbench.bench.exit_codes import ExitCode, combine_exit_codes
from parbench.bench.results.formatting import UNKNOWN
from parbench.bench.results.runs import Run
from parbench.bench.text import format_list, name_first, pluralize
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.analysis.labels import PAIRS, label_cases, list_environment_facts
from parbench.reports.analysis.topology import ONE_RANK_PER_NODE
from parbench.reports.analysis.verdicts import ReportVerdict
from parbench.reports.frames import build_cases_frame
from parbench.reports.run_data import RunData
from parbench.reports.sweeps import LoadedRuns, load_runs

if TYPE_CHECKING:
    import pandas as pd

IGNORED_FACTS = (
    "boot_id",
    "job",
    "SLURM_JOB_ID",
    "nodelist",
    "SLURM_JOB_NODELIST",
)
"""The last parts of the dotted names of facts that differ between runs but are not settings."""
MAX_NAMED_SETTINGS = 4
"""The largest number of differing settings that the heading of a report names."""


class RunSet:
    """Several runs for one report, numbered from 1 in the given order."""

    def __init__(self, runs: LoadedRuns, missing: Sequence[str] = ()) -> None:
        """Merge the records of each run.

        ``runs`` has each run with its sweep point. ``missing`` has a sentence for each run that is
        absent or cannot be read.
        """
        self.missing = tuple(missing)
        """Sentences about runs that are absent or cannot be read."""
        self.runs = {
            number: RunData(run, point) for number, (run, point) in enumerate(runs, start=1)
        }
        """The data of each run, keyed by its number."""

    @classmethod
    def load(cls, folders: Sequence[Path]) -> "RunSet":
        """Load the runs and sweeps in ``folders``. Raises ``UserError`` if no run can be read."""
        return cls(*load_runs(folders))

    @cached_property
    def cases(self) -> "pd.DataFrame":
        """The measured cases of all runs: the columns of ``RunData.cases``, and these.

        * ``run``: the number of the run, from 1.
        * ``match``: the name and the parameters of the case without ``varied_params``. Equal texts
          are the same case in different runs.
        * ``is_whole_world``: True if all ranks of the run took part.
        * ``ranks_per_node``, ``distribution`` (of ranks over nodes, such as ``block``) and
          ``environment`` (the name of a set of environment variables). Unknown texts are empty.
        * ``scaling_value``: for communication the bus bandwidth in B/s, for steps the step time in
          seconds.
        * ``rate``: for communication the bus bandwidth in B/s, for steps the tokens per second, or
          the steps per second if tokens are unknown.
        """
        import pandas as pd

        results: list[CaseResult] = []
        rows = []
        for number, data in self.runs.items():
            results += data.measured
            rows += [{"run": number, **self._describe_case(data, case)} for case in data.measured]
        return build_cases_frame(results, label_cases(results)).join(pd.DataFrame(rows))

    def _describe_case(self, data: RunData, result: CaseResult) -> dict[str, object]:
        """Return the values of one case of a run in those columns of ``cases`` that no record has.

        The keys are the columns, such as ``ranks_per_node``, ``environment`` and ``rate``.
        """
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
        distribution = data.point.distribution if data.point else ""
        if data.nodes:
            distribution = data.nodes.distribution
        if world.nodes < 2 or distribution == ONE_RANK_PER_NODE:
            distribution = ""
        return {
            "match": " ".join([case.name, case.target, *sorted(params)]),
            "is_whole_world": "group" not in case.params,
            "ranks_per_node": world.size / world.nodes if world.nodes else 0.0,
            "distribution": distribution,
            "environment": data.point.environment if data.point else "",
            "scaling_value": value,
            "rate": rate,
        }

    @cached_property
    def varied_params(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The values of each parameter that is constant within runs but differs between runs.

        A key is (name of the benchmark, name of the parameter). A value has the text of the
        parameter in each run, in the order of the runs. Only parameters of all runs count.
        """
        first, *others = [_list_constant_params(data) for data in self.runs.values()]
        varied = {}
        for name, value in first.items():
            values = (value, *(params.get(name, value) for params in others))
            if len(set(values)) > 1 and all(name in params for params in others):
                varied[name] = values
        return varied

    @cached_property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """The facts and parameters that differ between runs, keyed by name.

        A name is dotted for a fact of the plan or the environment (``plan.nproc``), and ``BENCHMARK
        PARAMETER`` for a parameter. A value has the text in each run, in the order of the runs, and
        ``-`` for a run without the fact.
        """
        facts = [_list_facts(data.run) for data in self.runs.values()]
        names = dict.fromkeys(name for run_facts in facts for name in run_facts)
        texts = {name: tuple(run_facts.get(name, UNKNOWN) for run_facts in facts) for name in names}
        for (case_name, param), values in self.varied_params.items():
            texts[f"{case_name} {param}"] = values
        return {name: values for name, values in texts.items() if len(set(values)) > 1}

    def describe_differences(self) -> str:
        """Return a sentence that names the first settings in which the runs differ.

        If the runs do not differ, the sentence states this.
        """
        if not self.differences:
            return "All runs have the same settings."
        names = name_first(list(self.differences), MAX_NAMED_SETTINGS)
        return f"Runs differ in {', '.join(names)}."

    @property
    def exit_code(self) -> int:
        """The worst exit code of the runs. A missing run has the exit code 4 (did not run)."""
        codes = [data.exit_code for data in self.runs.values()]
        return combine_exit_codes([*codes, ExitCode.DID_NOT_RUN] if self.missing else codes)

    @property
    def verdict(self) -> ReportVerdict:
        """The verdict on the runs together.

        FAILED: a run has an exit code other than 0. INCOMPLETE: a run is missing. Otherwise PASSED.
        """
        failed = [str(number) for number, data in self.runs.items() if data.exit_code]
        message = f"{len(self.runs) - len(failed)} of {pluralize(len(self.runs), 'run')} passed"
        if self.missing:
            message += f", {pluralize(len(self.missing), 'run')} missing"
        if failed:
            message += f". Failed: run {format_list(failed, 'and')}"
            return ReportVerdict("FAILED", "bad", message)
        if self.missing:
            return ReportVerdict("INCOMPLETE", "bad", message)
        return ReportVerdict("PASSED", "good", message)


def _list_constant_params(data: RunData) -> dict[tuple[str, str], str]:
    """Return the parameters that have one value in all cases of a benchmark in a run.

    A key is (name of the benchmark, name of the parameter), and a value is the parameter as text.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for result in data.results:
        for param, value in result.case.params.items():
            values[result.case.name, param].add(str(value))
    return {name: texts.pop() for name, texts in values.items() if len(texts) == 1}


def _list_facts(run: Run) -> dict[str, str]:
    """Return the settings and the environment of a run as text, keyed by dotted name.

    Facts that are not settings, such as the job id and the load of the host, are left out.
    """
    plan = run.info.plan
    facts = {
        "plan.preset": plan.preset,
        "plan.nproc": str(plan.nproc),
        "plan.backend": plan.backend,
        "plan.device": plan.device,
        "plan.repetitions": str(plan.repetitions),
        "host": run.info.host,
        "parbench": run.info.parbench,
    }
    for name, text in list_environment_facts(run.info.environment or {}):
        last_word = name.rpartition(".")[2]
        if last_word not in IGNORED_FACTS and not last_word.startswith(PAIRS):
            facts[f"environment.{name}"] = text
    return facts
