"""Several runs for a report: their cases in one frame, their differences, and their verdict."""

from collections.abc import Sequence
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
from parbench.reports.sweeps import LoadedRuns, load_runs

if TYPE_CHECKING:
    import pandas as pd

_IDENTITIES = ("boot_id", "job", "SLURM_JOB_ID")
"""Facts that differ between any two runs."""
_CIRCUMSTANCES = ("nodelist", "SLURM_JOB_NODELIST")
"""Facts that are not settings, but that may explain a difference in time."""
_UNKNOWN_DISTRIBUTION = "distribution unknown"


class RunSet:
    """Several runs for one report, numbered from 1 in the given order."""

    def __init__(self, runs: LoadedRuns, missing: Sequence[str] = ()) -> None:
        """Merge the records of each run.

        ``runs`` has each run with its sweep point. ``missing`` has a sentence for each run of a
        sweep that is absent or cannot be read.
        """
        self.missing = tuple(missing)
        """Sentences about runs that are absent or cannot be read."""
        self.runs = {
            number: RunData(run, point) for number, (run, point) in enumerate(runs, start=1)
        }
        """The data of each run, keyed by its number."""

    @classmethod
    def load(cls, folders: Sequence[Path], *, is_strict: bool = True) -> "RunSet":
        """Load the runs, folders of runs or sweeps in ``folders``. Raises as ``load_runs``.

        Without ``is_strict``, a folder that cannot be read becomes a sentence in ``missing``.
        """
        return cls(*load_runs(folders, is_strict=is_strict))

    @cached_property
    def current_runs(self) -> dict[int, RunData]:
        """The runs keyed by number, without runs of a sweep that a later run repeats.

        A later run repeats an earlier one if it measured the same sweep point (combination of
        settings).
        """
        last_numbers = {data.point.id: number for number, data in self.runs.items() if data.point}
        return {
            number: data
            for number, data in self.runs.items()
            if not data.point or last_numbers[data.point.id] == number
        }

    @cached_property
    def cases(self) -> "pd.DataFrame":
        """The measured cases of all runs: the columns of ``RunData.cases``, and these.

        * ``run``: the number of the run. ``is_current``: no later run measured the same sweep
          point.
        * ``match``: the name and the parameters of the case, without those that vary by run.
        * ``is_whole_world``: all ranks took part.
        * ``ranks_per_node``, ``distribution`` (of ranks over nodes) and ``environment`` (name of a
          set of variables). The texts are empty if there is only one.
        * ``scaling_value``: bus bandwidth of communication in B/s, otherwise the step time in
          seconds. ``rate``: bus bandwidth, otherwise tokens or steps per second.
        """
        import pandas as pd

        results: list[CaseResult] = []
        rows = []
        for number, data in self.runs.items():
            results += data.measured
            rows += [self._describe_case(number, data, result) for result in data.measured]
        extra = pd.DataFrame(rows)
        return build_cases_frame(results, label_cases(results)).join(extra)

    def _describe_case(self, number: int, data: RunData, result: CaseResult) -> dict[str, object]:
        """Return the values of one case in the columns that ``cases`` adds, keyed by column.

        ``number`` is the number of the run that measured ``result``.
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
        return {
            "run": number,
            "is_current": number in self.current_runs,
            "match": " ".join([case.name, case.target, *sorted(params)]),
            "is_whole_world": "group" not in case.params,
            "ranks_per_node": world.size / world.nodes if world.nodes else 0.0,
            "distribution": _get_distribution(data, result),
            "environment": data.point.environment if data.point else "",
            "scaling_value": value,
            "rate": rate,
        }

    @cached_property
    def varied_params(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The values of each parameter that is constant within runs but differs between runs.

        A key is (name of the case, name of the parameter). A value has the text of the parameter in
        each run, in the order of the runs.
        """
        import pandas as pd

        rows = [
            (result.case.name, param, number, str(value))
            for number, data in self.runs.items()
            for result in data.results
            for param, value in result.case.params.items()
        ]
        columns = ["name", "param", "run", "value"]
        values = pd.DataFrame(rows, columns=columns).drop_duplicates()
        varied = {}
        for (name, param), by_run in values.groupby(["name", "param"], sort=False):
            has_one_value = by_run["run"].tolist() == list(self.runs)
            if has_one_value and by_run["value"].nunique() > 1:
                varied[str(name), str(param)] = tuple(by_run["value"])
        return varied

    @cached_property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """The facts and parameters that differ between runs, keyed by dotted name.

        A value has the text of the fact in each run, in order, and ``-`` for a run without the
        fact.
        """
        facts = [_list_facts(data.run) for data in self.runs.values()]
        names = dict.fromkeys(name for run_facts in facts for name in run_facts)
        texts = {name: tuple(run_facts.get(name, UNKNOWN) for run_facts in facts) for name in names}
        for (case_name, param), values in self.varied_params.items():
            texts[f"{case_name} {param}"] = values
        return {name: values for name, values in texts.items() if len(set(values)) > 1}

    def describe_differences(self) -> str:
        """Return a sentence with the setting in which the runs differ, or their number.

        Facts that are not settings, such as the load of the host, are not counted.
        """
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
        """The worst exit code of the runs, without runs that a later run repeats.

        A missing run counts as did-not-run.
        """
        codes = [data.exit_code for data in self.current_runs.values()]
        if self.missing:
            codes.append(ExitCode.DID_NOT_RUN)
        return combine_exit_codes(codes)

    @property
    def verdict(self) -> ReportVerdict:
        """The verdict on the runs, without runs that a later run repeats.

        FAILED: a run has an exit code other than 0. INCOMPLETE: a run of a sweep is missing.
        Otherwise PASSED.
        """
        failed = [str(number) for number, data in self.current_runs.items() if data.exit_code]
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


def _get_distribution(data: RunData, result: CaseResult) -> str:
    """Return the distribution of a case's ranks over nodes, such as ``block``.

    It is empty if only one distribution is possible, as with one rank per node, and ``distribution
    unknown`` if several are possible and none was recorded.
    """
    nodes = result.world.nodes
    distribution = data.point.distribution if data.point else ""
    if data.nodes:
        distribution = data.nodes.distribution
    if nodes < 2 or result.world.size <= nodes or distribution == ONE_RANK_PER_NODE:
        return ""
    return distribution or _UNKNOWN_DISTRIBUTION


def _list_facts(run: Run) -> dict[str, str]:
    """Return the settings and the environment of a run as text, keyed by dotted name.

    Facts that differ between any two runs, such as the job id, are left out.
    """
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
