"""Evidence about the links, groups and operations of a run."""

from collections.abc import Iterator, Sequence

from parbench.bench.results.formatting import format_case_size
from parbench.reports.case_results import CaseResult
from parbench.reports.findings.commands import build_case_command
from parbench.reports.findings.evidence import Groups, Link, Links, TimeComparison
from parbench.reports.fits import Curve, get_size
from parbench.reports.labels import label_communication, label_operation
from parbench.reports.run_data import RunData
from parbench.reports.stats import estimate_paired_effect

COMPOSITES = dict.fromkeys(("reduce_scatter", "all_gather", "broadcast", "reduce"), "all_reduce")
"""Operations, each with one that does the same work and more."""
GROUP_PARAMS = ("group", "group_index", "concurrent")
LOADS = {
    "background": "nothing",
    "concurrent": False,
}
"""The parameters that add a load during an operation, with their values without load."""


def collect_links(data: RunData) -> Iterator[Links]:
    """Yield the links of each size, type and mode by the distance of their ranks."""
    matrix = [result for result in data.measured if result.case.name == "p2p.matrix"]
    for results in _group_without(matrix, ("source", "target")):
        by_distance: dict[str, dict[Link, CaseResult]] = {}
        for result in results:
            source, target = result.case.params["source"], result.case.params["target"]
            if isinstance(source, int) and isinstance(target, int) and result.value("busbw"):
                distance = data.nodes.get_distance(source, target) if data.nodes else ""
                by_distance.setdefault(distance, {})[source, target] = result
        command = "parbench slurm screen"
        if data.nodes is None:
            command = build_case_command(
                results[0].case,
                data.run,
                sizes=format_case_size(get_size(results[0])),
                without=("source", "target"),
                repetitions=5,
            )
        for distance, by_link in by_distance.items():
            yield Links(
                distance=distance,
                rates={link: result.value("busbw") or 0.0 for link, result in by_link.items()},
                rates_by_repetition={
                    link: list(result.by_repetition("busbw").values())
                    for link, result in by_link.items()
                },
                command=command,
            )


def collect_groups(data: RunData) -> Iterator[Groups]:
    """Yield the bandwidths of operations that several groups of the same kind ran one by one."""
    results = [
        result
        for result in data.communication
        if "group" in result.case.params
        and not result.case.params.get("concurrent")
        and result.value("busbw")
    ]
    for group_results in _group_without(results, ("group_index",)):
        if len(group_results) < 2:
            continue
        first = group_results[0]
        operation = label_operation(first.case, GROUP_PARAMS)
        yield Groups(
            operation=f"{operation} {format_case_size(get_size(first))}",
            rates={_name_group(result): result.value("busbw") or 0.0 for result in group_results},
            num_observations=first.repetitions,
            command=build_case_command(
                first.case,
                data.run,
                sizes=format_case_size(get_size(first)),
                without=("group_index",),
            ),
        )


def compare_with_fits(data: RunData) -> Iterator[TimeComparison]:
    """Compare the sizes that are outliers of a fit with the fit."""
    for curve in data.curves:
        total_seconds = sum(result.seconds or 0.0 for result in curve.rows)
        for size, error in curve.fit.outliers:
            if error > 0:
                result = next(result for result in curve.rows if get_size(result) == size)
                yield _compare_with_fit(data, curve, result, total_seconds)


def compare_with_composites(data: RunData) -> Iterator[TimeComparison]:
    """Compare operations with one that does the same work and more."""
    by_key = {_make_key(result): result for result in data.communication}
    for results in _group_without(data.communication, ("size_bytes",)):
        name = results[0].case.short_name
        if name not in COMPOSITES:
            continue
        total_seconds = sum(result.seconds or 0.0 for result in results)
        for result in results:
            composite = by_key.get(_make_key(result, name=COMPOSITES[name]))
            if composite is None:
                continue
            command = build_case_command(
                result.case,
                data.run,
                operations=(name, composite.case.short_name),
                sizes=format_case_size(get_size(result)),
                repetitions=10,
            )
            yield from _compare_times(
                composite,
                result,
                name=label_communication(result.case),
                reference=composite.case.short_name,
                total_seconds=total_seconds,
                command=command,
            )


def compare_background_loads(data: RunData) -> Iterator[TimeComparison]:
    """Compare operations during a load with the same operations without it."""
    for param, no_load in LOADS.items():
        for results in _group_without(data.communication, (param,)):
            unloaded = [result for result in results if param not in result.case.params]
            for result in results:
                load = result.case.params.get(param)
                if load is None or not unloaded:
                    continue
                command = build_case_command(
                    result.case,
                    data.run,
                    sizes=format_case_size(get_size(result)),
                    changes={param: (no_load, load)},
                )
                yield from _compare_times(
                    unloaded[0],
                    result,
                    name=label_communication(unloaded[0].case),
                    reference="the same operation in all groups" if load is True else str(load),
                    total_seconds=result.seconds or 0.0,
                    command=command,
                )


def _compare_with_fit(
    data: RunData, curve: Curve, result: CaseResult, total_seconds: float
) -> TimeComparison:
    size = get_size(result)
    seconds = result.value("time") or 0.0
    fit_seconds = curve.fit.predict(size)
    sizes = f"{format_case_size(size // 4)}:{format_case_size(4 * size)}:x2"
    return TimeComparison(
        name=label_communication(result.case),
        id=result.case.id,
        seconds=seconds,
        reference="this run",
        reference_seconds=fit_seconds,
        ratios=[time / fit_seconds for time in result.by_repetition("time").values()],
        lost_seconds=seconds - fit_seconds,
        total_seconds=total_seconds,
        command=build_case_command(result.case, data.run, sizes=sizes),
    )


def _compare_times(
    base: CaseResult,
    result: CaseResult,
    *,
    name: str,
    reference: str,
    total_seconds: float,
    command: str,
) -> Iterator[TimeComparison]:
    """Yield the comparison of two results, paired by repetition, if a repetition has both."""
    base_times = base.by_repetition(base.headline)
    times = result.by_repetition(result.headline)
    effect = estimate_paired_effect(base_times, times)
    if effect is None:
        return
    seconds = result.seconds or 0.0
    reference_seconds = seconds / effect.ratio
    yield TimeComparison(
        name=name,
        id=result.case.id,
        seconds=seconds,
        reference=reference,
        reference_seconds=reference_seconds,
        ratios=[times[number] / base_times[number] for number in base_times if number in times],
        low_ratio=None if effect.low is None else 1 + effect.low,
        lost_seconds=seconds - reference_seconds,
        total_seconds=total_seconds,
        command=command,
    )


def _group_without(results: Sequence[CaseResult], params: Sequence[str]) -> list[list[CaseResult]]:
    """Return the results in groups that differ only in these parameters."""
    groups: dict[object, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(_make_key(result, without=params), []).append(result)
    return list(groups.values())


def _make_key(result: CaseResult, *, name: str = "", without: Sequence[str] = ()) -> object:
    """Return the operation, ranks and parameters of a result, with another operation if given."""
    params = {key: value for key, value in result.case.params.items() if key not in without}
    key_name = name or result.case.short_name
    return key_name, result.kind, result.world, result.num_ranks, frozenset(params.items())


def _name_group(result: CaseResult) -> str:
    """Return the kind and the ranks of the group of a result: ``node 4,5``."""
    params = result.case.params
    ranks = result.details.get("group_ranks")
    members = ",".join(map(str, ranks)) if ranks else f"number {params.get('group_index', 0)}"
    return f"{params['group']} {members}"
