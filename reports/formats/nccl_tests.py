"""The collectives of a run as nccl-tests prints them: a table for each operation and mode.

The layout, the names and the meaning of ``count`` are those of nccl-tests 2.19.6 (its src/util.cu
and src/common.cu). A line has a size and its two placements (in and out of place). Times are in us,
bandwidths in 1e9 B/s.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import DTYPES, IN_PLACE, OUT_OF_PLACE, OperationSpec
from parbench.bench.results.formatting import GIGA, to_single_line
from parbench.bench.results.records import MIN_HIDDEN
from parbench.bench.results.runs import Run
from parbench.bench.text import format_list
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.formats.imported import MICRO, OPERATIONS_BY_NAME, UNKNOWN
from parbench.reports.run_data import RunData

VERSION = "2.19.6"
"""The version of nccl-tests whose layout the export has."""
PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "all_to_all_v": "alltoallv_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "gather": "gather_perf",
    "scatter": "scatter_perf",
    "sendrecv": "sendrecv_perf",
}
"""The program of nccl-tests for each operation, keyed by the short name of the operation."""
TYPES = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "float32": "float",
    "float16": "half",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
"""The name of each torch dtype in nccl-tests, keyed by dtype."""
REDOPS = {
    "sum": "sum",
    "avg": "avg",
    "min": "min",
    "max": "max",
    "product": "prod",
    "none": "none",
}
"""The name of each reduction in nccl-tests."""
_PLACEMENTS = (OUT_OF_PLACE, IN_PLACE)
_GRAPH_OPTION = {"pipelined": 0, "graph": 1}  # The modes of nccl-tests, by its option -G.
"""The modes that nccl-tests can measure, each with the value of its option ``-G``."""
_COLUMNS = ("size_bytes", "dtype", "redop", "root", "placement")
"""The parameters of a case that have columns in a table, so that one table has all their values."""
_LINE_WIDTHS = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"


def render_text(data: RunData) -> bytes:
    """Return the collectives of a run as encoded text in the layout of nccl-tests.

    Cases that no table can show are named in comments at the end. If torch has only one placement
    of an operation, its numbers are repeated in the columns of the other, because readers expect
    numbers in both.
    """
    results, comments = _select_results(data.results)
    for skipped in data.plan.skipped:
        comments.append(f"{skipped.case.label}: skipped: {skipped.reason}")
    for missing in data.missing:
        count = f"{missing.repetitions} of {missing.planned} repetitions"
        comments.append(f"{missing.case.label}: no record of {count}")
    tables: dict[object, list[CaseResult]] = {}
    for result in results:
        tables.setdefault(_make_key(result, _COLUMNS), []).append(result)
    lines = [line for table in tables.values() for line in (*_render_table(data.run, table), "")]
    lines += [f"# Not in any table: {to_single_line(comment)}" for comment in comments]
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def _select_results(results: Sequence[CaseResult]) -> tuple[list[CaseResult], list[str]]:
    """Return the results that tables can show, and a comment about each result that is left out.

    If an operation was measured on CUDA in several modes, such as pipelined and blocking, only the
    modes that nccl-tests also has are shown.
    """
    comments: list[str] = []
    series: dict[object, list[CaseResult]] = {}
    for result in results:
        reason = _find_missing_counterpart(result.case)
        if reason:
            comments.append(f"{result.case.label}: {reason}")
        else:
            key = _make_key(result, ("mode", "size_bytes", "placement"))
            series.setdefault(key, []).append(result)
    selected: list[CaseResult] = []
    for candidates in series.values():
        modes = {_get_mode(result) for result in candidates if _is_comparable(result)}
        for result in candidates:
            if not modes or _get_mode(result) in _GRAPH_OPTION:
                selected.append(result)
                continue
            names = format_list(sorted(modes), "and")
            comments.append(
                f"{result.case.label}: nccl-tests measures mode {names}, which is above"
            )
    return selected, comments


def _is_comparable(result: CaseResult) -> bool:
    """Return True for a result on CUDA that has a time, in a mode that nccl-tests has."""
    is_measured = result.world.device == "cuda" and not _explain_omission(result)
    return is_measured and _get_mode(result) in _GRAPH_OPTION


def _get_mode(result: CaseResult) -> str:
    """Return the mode in which a result was measured, such as ``pipelined``, or ``UNKNOWN``."""
    return str(result.case.params.get("mode", UNKNOWN))


def _make_key(result: CaseResult, without: Sequence[str]) -> tuple[object, ...]:
    """Return the operation, ranks, nodes and parameters of a result, except ``without``.

    ``without`` names parameters. Results with equal keys belong together, for example to one table.
    """
    params = _complete_params(result.case).items()
    values = tuple((name, value) for name, value in params if name not in without)
    return result.case.name, result.world.size, result.world.nodes, values


def _complete_params(case: Case) -> dict[str, Any]:
    """Return the parameters of a case by name, with the values that nccl-tests prints by default.

    The defaults are for mode, redop, root and placement.
    """
    operation = _get_operation(case)
    return {
        "mode": UNKNOWN,
        "redop": "sum" if operation.is_reduction else "none",
        "root": -1,
        "placement": operation.placements[0],
        **case.params,
    }


def _get_operation(case: Case) -> OperationSpec:
    """Return the specification of the collective that a case measures."""
    return OPERATIONS_BY_NAME[case.short_name]


def _find_missing_counterpart(case: Case) -> str | None:
    """Return the reason why no table of nccl-tests can show a case, None if a table can show it."""
    operation = OPERATIONS_BY_NAME.get(case.short_name)
    if operation is None or operation.name != case.name or case.short_name not in PROGRAMS:
        return "no nccl-tests equivalent"
    if not isinstance(case.params.get("size_bytes"), int):
        return "it has no size"
    if "dtype" not in case.params:
        return "its type is unknown"
    params = _complete_params(case)
    for name, known in (("dtype", TYPES), ("placement", _PLACEMENTS), ("redop", REDOPS)):
        if params[name] not in known:
            return f"nccl-tests has no {name} {params[name]}"
    return None


def _explain_omission(result: CaseResult) -> str | None:
    """Return the reason why a result has no numbers for a table, None if it has a time."""
    if result.status != "ok":
        reasons = to_single_line("; ".join(result.reasons))
        return f"{result.status}: {reasons or 'no reason is known'}"
    return None if result.seconds else "it has no time"


def _render_table(run: Run, results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the lines of a table of nccl-tests, from its header to the average bus bandwidth.

    All ``results`` are of one operation and mode. Results without a time become comments.
    """
    case = results[0].case
    operation = _get_operation(case)
    mode = _get_mode(results[0])
    program = PROGRAMS[operation.short_name]
    timed_results = [result for result in results if not _explain_omission(result)]
    lines = _arrange_lines(timed_results)
    sizes = sorted({result.size_bytes or 0 for result in timed_results})
    num_wrong = sum(
        max(1, result.check.wrong or 0) for result in results if result.status == "wrong"
    )
    is_checked = num_wrong > 0 or any(result.check.passed for result in timed_results)
    iterations = max((result.iterations for result in timed_results), default=0)
    # A case that failed may not know the size of its group.
    ranks = min(result.num_ranks for result in results)
    nccl = _encode_nccl_version(run)
    yield f"# nccl-tests version {VERSION} nccl-headers={nccl} nccl-library={nccl}"
    yield f"# Collective test starting: {program}"
    yield (
        f"# nThread 1 nGpus 1 minBytes {min(sizes, default=0)} maxBytes {max(sizes, default=0)} "
        f"step: 0(bytes) warmup iters: {run.info.plan.measure.warmup} "
        f"iters: {iterations} agg iters: 1 validation: {is_checked:d} "
        f"graph: {_GRAPH_OPTION.get(mode, 0)} unalign: 0"
    )
    yield f"# Written by parbench {run.info.parbench}: {_format_facts(results[0], ranks)}"
    yield from _describe_differences(timed_results)
    repeated = _find_repeated_placement(operation, lines)
    for placement in _PLACEMENTS:
        name = placement.replace("_", "-")
        if placement == repeated:
            yield f"# {name} repeats the other placement: {operation.short_name} has no {name}"
        elif any(placement not in line for line in lines):
            yield f"# N/A under {name}: not measured"
    yield "#"
    yield "# Using devices"
    yield from _render_devices(run, results[0], ranks)
    heading = "     time   algbw   busbw  #wrong" * 2
    units = "     (us)  (GB/s)  (GB/s)        " * 2
    yield "#"
    yield f"# {'out-of-place':>73}{'in-place':>31}{'':10}"
    yield f"#       size         count      type   redop    root{heading} "
    yield f"#        (B)    (elements)                          {units} "
    for line in lines:
        yield _render_line(line, repeated)
    for result in results:
        reason = _explain_omission(result)
        if reason:
            yield f"# Left out: {to_single_line(result.case.label)}: {reason}"
    rates = [_get_rate(result, "busbw") for result in timed_results]
    known_rates = [rate / GIGA for rate in rates if rate is not None]
    average = f"{fmean(known_rates):g}" if known_rates else "N/A"
    yield f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}"
    yield f"# Avg bus bandwidth    : {average} "
    yield "#"
    yield f"# Collective test concluded: {program}"


def _describe_differences(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield comments on times of results that are measured differently than in nccl-tests."""
    on_gpus = [result for result in results if result.world.device == "cuda"]
    if on_gpus:
        yield "# One buffer is used again, which caches may hold, and only graphs register it"
    if any(result.value("rank_mean_time") is None for result in on_gpus):
        yield "# Times are maxima over ranks, those of nccl-tests means over ranks"
    for result in results:
        shares = [record.details.get("launch_hidden", 1.0) for record in result.measured]
        if min(shares, default=1.0) < MIN_HIDDEN:
            share = 1 - min(shares)
            yield f"# {result.case.label}: {share:.0%} of iterations include launches of the host"


def _get_time(result: CaseResult) -> float | None:
    """Return the time of a result in seconds: the mean over ranks, as nccl-tests reports it.

    If that mean was not recorded, it is the maximum over ranks. None if no time is known.
    """
    return result.value("rank_mean_time") or result.value(result.headline)


def _get_rate(result: CaseResult, name: str) -> float | None:
    """Return a bandwidth in B/s that fits the printed time, None if it is unknown.

    ``name`` is ``algbw`` or ``busbw``. The recorded bandwidth is for the maximum time over ranks,
    so it is converted to the mean over ranks.
    """
    rate, time = result.value(name), _get_time(result)
    return rate * result.seconds / time if rate is not None and result.seconds and time else rate


def _arrange_lines(results: Sequence[CaseResult]) -> list[dict[str, CaseResult]]:
    """Return the results of each line of a table, keyed by placement (in or out of place).

    A line is a message size. Lines with the same type, redop and root follow each other in
    ascending order of size.
    """
    blocks: dict[object, dict[int, dict[str, CaseResult]]] = {}
    for result in results:
        block = blocks.setdefault(_make_key(result, ("size_bytes", "placement")), {})
        params = _complete_params(result.case)
        block.setdefault(params["size_bytes"], {})[params["placement"]] = result
    return [block[size] for block in blocks.values() for size in sorted(block)]


def _find_repeated_placement(
    operation: OperationSpec, lines: Sequence[Mapping[str, CaseResult]]
) -> str | None:
    """Return the placement (in or out of place) that torch lacks for an operation.

    Its columns repeat the other placement. None if torch has both placements, or if both were
    measured. ``lines`` are the results of each line, keyed by placement.
    """
    measured = {placement for line in lines for placement in line}
    if len(operation.placements) > 1 or len(measured) != 1:
        return None
    return next(placement for placement in _PLACEMENTS if placement not in measured)


def _encode_nccl_version(run: Run) -> int:
    """Return the version of NCCL as its headers encode it: 22809 for 2.28.9, 0 if unknown."""
    version = str(_get_environment(run, "torch").get("nccl"))
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return 0
    major, minor, patch = map(int, match.groups())
    return major * 10000 + minor * 100 + patch


def _get_environment(run: Run, name: str) -> Mapping[str, Any]:
    """Return the values of one part of a run's environment by name, such as ``torch`` or ``host``.

    Empty if the run does not have that part.
    """
    group = (run.info.environment or {}).get(name)
    return group if isinstance(group, Mapping) else {}


def _format_facts(result: CaseResult, ranks: int) -> str:
    """Return the facts that have no column as ``name=value`` words, which the importer reads.

    These are mode, backend, device, nodes, and the parameters of the case. ``ranks`` is the number
    of ranks of the table, and ``world`` is added if the job has more ranks.
    """
    params = _complete_params(result.case)
    world = result.world
    facts = {
        "mode": params["mode"],
        "backend": world.backend,
        "device": world.device,
        "nodes": world.nodes,
    }
    if world.size != ranks:
        facts["world"] = world.size
    facts |= {name: value for name, value in params.items() if name not in _COLUMNS}
    return to_single_line(" ".join(f"{name}={value}" for name, value in facts.items()))


def _render_devices(run: Run, result: CaseResult, ranks: int) -> Iterator[str]:
    """Yield the line of each rank that nccl-tests prints above a table.

    Only a run on one node states its host. Process and device ids were not recorded, so they are
    -1. ``ranks`` is the number of ranks to list.
    """
    host = _get_environment(run, "host")
    name = host.get("name") or run.info.host
    if result.world.nodes != 1:
        name = UNKNOWN
    model = host.get("cpu_model")
    if result.world.device == "cuda":
        model = _get_environment(run, "torch").get("gpu")
    for rank in range(ranks):
        place = f"on {name!s:>10} device {-1:2d} [unknown] {model or UNKNOWN}"
        yield f"#  Rank {rank:2d} Group  0 Pid {-1:6d} {place}"


def _render_line(line: Mapping[str, CaseResult], repeated: str | None) -> str:
    """Return the line of a message size in a table of nccl-tests.

    Args:
        line: the results of this size, keyed by placement (in or out of place).
        repeated: the placement that was not measured and repeats the numbers of the other one, or
            None.
    """
    result = next(iter(line.values()))
    params = _complete_params(result.case)
    size, dtype = params["size_bytes"], params["dtype"]
    count = size // DTYPES[dtype].itemsize
    if _get_operation(result.case).sharded:
        count //= result.num_ranks
    text = _LINE_WIDTHS.format(size, count, TYPES[dtype], REDOPS[params["redop"]], params["root"])
    for placement in _PLACEMENTS:
        if placement == repeated:
            text += _render_numbers(result, is_checked=False)
        elif placement in line:
            text += _render_numbers(line[placement], is_checked=bool(line[placement].check.passed))
        else:
            text += f"  {'N/A':>7}{'     N/A' * 3}"
    return text


def _render_numbers(result: CaseResult, *, is_checked: bool) -> str:
    """Return the columns time (us), algbw (GB/s), busbw (GB/s) and #wrong of one result.

    ``is_checked`` is False if the result was not compared with a reference. Then #wrong is N/A.
    """
    time = _fit_number(_get_time(result), MICRO, 7)
    algbw = _fit_number(_get_rate(result, "algbw"), GIGA, 6)
    busbw = _fit_number(_get_rate(result, "busbw"), GIGA, 6)
    # nccl-tests also prints one blank less where it does not check.
    wrong = "       0" if is_checked else "    N/A"
    return f"  {time}  {algbw}  {busbw}{wrong}"


def _fit_number(value: float | None, unit: float, width: int) -> str:
    """Return ``value / unit`` as text of ``width`` characters, ``N/A`` for None.

    It has at most two decimals, or fewer if the number is long.
    """
    if value is None:
        return f"{'N/A':>{width}}"
    number = value / unit
    free_width = width - (len(str(int(number))) if number >= 1 else 0)
    if free_width < 0:
        return f"{number:{width}.{1 if width >= 7 else 0}e}"
    return f"{number:{width}.{min(2, max(0, free_width - 1))}f}"
