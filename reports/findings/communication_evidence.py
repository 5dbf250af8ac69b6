"""Evidence for findings about slow links, groups and operations, from the records of a run."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from parbench.bench.results.formatting import format_case_size
from parbench.reports.analysis.case_results import CaseResult, group_results
from parbench.reports.analysis.fits import OperationCurve
from parbench.reports.analysis.labels import label_communication, label_operation
from parbench.reports.findings.commands import build_case_command
from parbench.reports.findings.evidence import Rates, TimeComparison
from parbench.reports.run_data import RunData
from parbench.reports.stats import Repetitions, estimate_paired_effect

COMPOSITE = "all_reduce"
"""The operation that is compared with the operations whose work it includes."""
PARTS_OF_COMPOSITE = ("reduce_scatter", "all_gather", "broadcast", "reduce")
"""The operations whose work ``COMPOSITE`` includes, so that they should not take longer."""
LINK_PARAMS = ("source", "target")
"""The parameters of ``p2p.matrix`` that name the sending and the receiving rank."""


def collect_rates(data: RunData) -> Iterator[Rates]:
    """Yield sets of bus bandwidths that should be equal, in which a slow link or group stands out.

    There are three kinds of sets: the links of ``p2p.matrix`` at one network distance by rank, the
    same links by pair of ranks, and the groups that ran one operation at one size. Groups that ran
    at the same time are left out.
    """
    known = [result for result in data.measured if result.value("busbw")]
    links = [result for result in known if result.case.name == "p2p.matrix"]
    for results in group_results(links, *LINK_PARAMS):
        command = "parbench slurm screen"
        if data.nodes is None:
            command = _build_command(data, results[0], without=LINK_PARAMS, repetitions=5)
        ranks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        pairs: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for result in results:
            source, target = (int(result.case.params[name]) for name in LINK_PARAMS)
            distance = data.nodes.get_distance(source, target) if data.nodes else ""
            rates = _list_bandwidths(result)
            pairs[distance][f"link from rank {source} to {target}"] = rates
            for rank in (source, target):
                ranks[distance][f"links of rank {rank}"] += rates
        for distance, by_name in (*ranks.items(), *pairs.items()):
            yield Rates(kind="slow-link", scope=distance, by_name=by_name, command=command)
    groups = [
        result
        for result in known
        if "group" in result.case.params and not result.case.params.get("concurrent")
    ]
    for results in group_results(groups, "group_index"):
        operation = label_operation(results[0].case, ("group", "group_index"))
        yield Rates(
            kind="slow-group",
            scope=f"{operation} {format_case_size(results[0].size_bytes)}",
            by_name={_name_group(result): _list_bandwidths(result) for result in results},
            command=_build_command(data, results[0], without=("group_index",)),
        )


def compare_operations(data: RunData) -> Iterator[TimeComparison]:
    """Yield comparisons of measured times of operations with times that they should not exceed.

    An operation at a size that is an outlier of its fit of time over size is compared with the fit.
    An operation whose work ``all_reduce`` includes, such as ``reduce_scatter``, is compared with
    ``all_reduce``.
    """
    for curve in data.curves:
        yield from _compare_with_fit(data, curve)
    composites = {
        result.make_key("case"): result
        for result in data.communication
        if result.case.short_name == COMPOSITE
    }
    for results in group_results(data.communication, "size_bytes"):
        name = results[0].case.short_name
        if name not in PARTS_OF_COMPOSITE:
            continue
        total_seconds = sum(result.seconds or 0.0 for result in results)
        for result in results:
            composite = composites.get(result.make_key("case"))
            if composite is None:
                continue
            command = _build_command(data, result, operations=(name, COMPOSITE), repetitions=10)
            yield from compare_times(
                composite.by_repetition(composite.headline),
                result.by_repetition(result.headline),
                kind="slower-than-composite",
                name=label_communication(result.case),
                reference=f"{COMPOSITE}, which includes its work",
                total_seconds=total_seconds,
                command=command,
            )


def _compare_with_fit(data: RunData, curve: OperationCurve) -> Iterator[TimeComparison]:
    """Yield a comparison with the fitted time for each size that is an outlier of a fit.

    ``curve`` is the fit of time over size with the results of its cases.
    """
    total_seconds = sum(result.seconds or 0.0 for result in curve.rows)
    outliers = {size for size, _ in curve.fit.outliers}
    for result in curve.rows:
        size = result.size_bytes
        if size not in outliers:
            continue
        times = result.by_repetition("time")
        sizes = f"{format_case_size(size // 4)}:{format_case_size(4 * size)}:x2"
        yield from compare_times(
            dict.fromkeys(times, curve.fit.predict(size)),
            times,
            kind="off-fit",
            name=label_communication(result.case),
            reference="its fit",
            total_seconds=total_seconds,
            command=build_case_command(result.case, data.run, sizes=sizes),
        )


def compare_times(
    reference_times: Repetitions,
    times: Repetitions,
    *,
    total_seconds: float,
    affected_seconds: float | None = None,
    **fields: Any,
) -> Iterator[TimeComparison]:
    """Yield a comparison of two times that are paired by repetition or call, none without pairs.

    Args:
        reference_times: the times that should not be exceeded, in seconds, keyed by repetition or
            call.
        times: the measured times of the operation, with the same keys.
        total_seconds: the time of which ``lost_share`` is a fraction.
        affected_seconds: the part of ``total_seconds`` that would shrink if the operation took its
            reference time. None is the mean of ``times``.
        fields: the other fields of ``TimeComparison``.
    """
    effect = estimate_paired_effect(reference_times, times)
    if effect is None:
        return
    seconds = fmean(times.values())
    if affected_seconds is None:
        affected_seconds = seconds
    yield TimeComparison(
        seconds=seconds,
        ratio=effect.ratio,
        low_ratio=None if effect.low is None else 1 + effect.low,
        lost_share=affected_seconds * (1 - 1 / effect.ratio) / total_seconds,
        **fields,
    )


def _build_command(data: RunData, result: CaseResult, **options: Any) -> str:
    """Return the command that measures a communication case at its size again.

    ``options`` are arguments of ``build_case_command``.
    """
    sizes = format_case_size(result.size_bytes)
    return build_case_command(result.case, data.run, sizes=sizes, **options)


def _list_bandwidths(result: CaseResult) -> list[float]:
    """Return the bus bandwidth of a case in each repetition in B/s, in repetition order."""
    return list(result.by_repetition("busbw").values())


def _name_group(result: CaseResult) -> str:
    """Return the name of a case's process group with its ranks: ``group node 4,5``."""
    params = result.case.params
    ranks = result.details.get("group_ranks")
    members = ",".join(map(str, ranks)) if ranks else f"number {params.get('group_index', 0)}"
    return f"group {params['group']} {members}"
