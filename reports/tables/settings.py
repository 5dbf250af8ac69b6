"""The table of environment variables: the time of each case by setting, and the fastest setting.

A setting is a combination of values of environment variables, such as ``NCCL_ALGO=Ring``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from parbench.bench.results.tables import Column, Table
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.run_data import RunData
from parbench.reports.stats import LEVEL, Effect, estimate_paired_effect, select_discoveries

UNSET = "unset"
"""The text of a variable that a setting leaves unset."""


def list_setting_tables(data: RunData) -> Iterator[Table]:
    """Yield the table of times by setting of environment variables.

    Yields nothing if no case ran with two settings.
    """
    by_case = _group_by_setting(data)
    if not by_case:
        return
    effects = {case: _compare_with_fastest(results) for case, results in by_case.items()}
    p_values = [effect.p_value for by_setting in effects.values() for effect in by_setting.values()]
    discoveries = iter(select_discoveries(p_values))
    rows = []
    for case, results in by_case.items():
        row: dict[str, Any] = {"case": case}
        row |= {setting: result.seconds for setting, result in results.items()}
        fastest = min(results, key=lambda setting: row[setting])
        slower = {setting for setting in effects[case] if next(discoveries)}
        row["best"] = ", ".join([fastest, *(name for name in effects[case] if name not in slower)])
        for effect in list(effects[case].values())[:1]:
            row |= effect.make_cells("lead")
        rows.append(row)
    settings = dict.fromkeys(setting for results in by_case.values() for setting in results)
    columns = [
        Column("case", help="case without the variables"),
        *(Column(name, kind="s", help=f"time with {name}", is_result=True) for name in settings),
        Column(
            "best",
            help="the fastest setting, and those that are not significantly slower",
            is_result=True,
        ),
        Column(
            "lead",
            "next / fastest",
            kind="number",
            help="time with the next setting relative to the fastest, paired by repetition",
            has_interval=True,
            is_result=True,
        ),
    ]
    note = (
        f"Best: settings that are not significantly slower than the fastest (false discovery rate "
        f"{100 * LEVEL:.0f} %). More repetitions separate them."
    )
    title = f"Best {' '.join(_list_variables(data))} by size"
    yield Table("settings", title, columns=columns, rows=rows, notes=[note])


def _group_by_setting(data: RunData) -> dict[str, dict[str, CaseResult]]:
    """Return the results of cases that ran with at least two settings of environment variables.

    The outer key is the label of the case without the variables, the inner key is the setting:
    ``Ring``, or ``NCCL_ALGO=Ring NCCL_PROTO=LL`` with several variables.
    """
    has_one_name = len(_list_variables(data)) == 1
    by_case: dict[str, dict[str, CaseResult]] = {}
    for result in data.measured:
        case = result.case
        if case.variables and result.seconds is not None:
            label = data.labels[case.id]
            for name, value in case.variables.items():
                label = label.replace(f" {name}={value}", "")
            settings = [f"{name}={value or UNSET}" for name, value in case.variables.items()]
            setting = " ".join(settings)
            if has_one_name:
                setting = setting.partition("=")[2]
            by_case.setdefault(label, {})[setting] = result
    return {case: results for case, results in by_case.items() if len(results) > 1}


def _list_variables(data: RunData) -> list[str]:
    """Return the names of all environment variables that cases of the run set."""
    return list(dict.fromkeys(name for result in data.measured for name in result.case.variables))


def _compare_with_fastest(results: Mapping[str, CaseResult]) -> dict[str, Effect]:
    """Return the change of time from the fastest setting to each slower one, keyed by setting.

    ``results`` are keyed by setting. The second fastest setting comes first. A setting that shares
    no repetition with the fastest is left out.
    """
    repetitions = {name: result.by_repetition(result.headline) for name, result in results.items()}
    ranking = sorted(results, key=lambda setting: results[setting].seconds or 0.0)
    effects = {}
    for setting in ranking[1:]:
        effect = estimate_paired_effect(repetitions[ranking[0]], repetitions[setting])
        if effect is not None:
            effects[setting] = effect
    return effects
