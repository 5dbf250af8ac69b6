"""The collectives of a run as nccl-tests prints them: a table for each operation and mode.

The columns and the meaning of ``count`` are those of nccl-tests 2.19.6. A line has a size and its
two placements (out of place and in place). Times are in us, bandwidths in 1e9 B/s.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from parbench.bench.plan.catalogue import DTYPES, IN_PLACE, OUT_OF_PLACE, get_busbw_factor
from parbench.bench.results.formatting import GIGA, to_single_line
from parbench.bench.results.runs import Run
from parbench.reports.analysis.case_results import CaseResult
from parbench.reports.formats.imported import MICRO, OPERATIONS_BY_NAME, UNKNOWN
from parbench.reports.formats.nccl_names import EXPORT_MARK, PROGRAMS, REDOPS, TYPES
from parbench.reports.run_data import RunData

_COLUMNS = ("size_bytes", "dtype", "redop", "root", "placement")
"""The parameters of a case that have columns in a table, so that one table has all their values."""
_LEADING_WIDTHS = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_HEADING = "     time   algbw   busbw  #wrong"
_UNITS = "     (us)  (GB/s)  (GB/s)        "


def render_text(data: RunData) -> bytes:
    """Return the collectives of a run as encoded text in the layout of nccl-tests.

    Cases that no table can show and cases without a time are named in comments at the end. Notes
    of cases, such as about times that include launches by the host, precede them.
    """
    tables: dict[object, list[CaseResult]] = {}
    comments = []
    notes = []
    for result in data.results:
        label = result.case.label
        if result.case.short_name not in PROGRAMS or result.size_bytes is None:
            comments.append(f"{label}: nccl-tests has no program for it")
            continue
        if result.seconds is None:
            comments.append(f"{label}: {result.status}: {'; '.join(result.reasons)}")
        if result.seconds or result.status == "wrong":
            params = _complete_params(result)
            others = tuple((name, params[name]) for name in params if name not in _COLUMNS)
            tables.setdefault((result.case.name, result.world, others), []).append(result)
            notes += [f"{label}: {note}" for note in result.notes]
    lines: list[str] = []
    for table in tables.values():
        lines += [*_render_table(data.run, table), ""]
    lines += [f"# Note: {to_single_line(note)}" for note in notes]
    lines += [f"# Not in any table: {to_single_line(comment)}" for comment in comments]
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def _complete_params(result: CaseResult) -> dict[str, Any]:
    """Return the parameters of a case, keyed by name, with defaults for those that it lacks.

    ``dtype``, ``redop``, ``root`` and ``placement`` have the defaults that nccl-tests prints.
    """
    operation = OPERATIONS_BY_NAME[result.case.short_name]
    return {
        "dtype": "float32",
        "redop": "sum" if operation.is_reduction else "none",
        "root": -1,
        "placement": "in_place" if operation.in_place else "out_of_place",
        **result.case.params,
    }


def _render_table(run: Run, results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the lines of a table of nccl-tests, from its header to the average bus bandwidth.

    All ``results`` are of one operation and mode. Results that failed the check of correctness are
    counted at the end and have no line.
    """
    program = PROGRAMS[results[0].case.short_name]
    world = results[0].world
    params = _complete_params(results[0])
    facts = {"backend": world.backend, "device": world.device, "nodes": world.nodes}
    facts |= {name: value for name, value in params.items() if name not in _COLUMNS}
    timed_results = [result for result in results if result.seconds]
    host = run.info.host if world.nodes == 1 else UNKNOWN
    yield "# nccl-tests version 2.19.6"
    yield f"# Collective test starting: {program}"
    words = " ".join(f"{name}={value}" for name, value in facts.items())
    yield f"{EXPORT_MARK} {run.info.parbench}: {to_single_line(words)}"
    yield "#"
    yield "# Using devices"
    for rank in range(results[0].num_ranks):
        yield f"#  Rank {rank:2d} Group  0 Pid     -1 on {host:>10} device -1 [unknown] unknown"
    yield "#"
    yield f"# {'out-of-place':>73}{'in-place':>31}"
    yield f"#       size         count      type   redop    root{_HEADING}{_HEADING}"
    yield f"#        (B)    (elements)                          {_UNITS}{_UNITS}".rstrip()
    for line in _arrange_lines(timed_results):
        yield _render_line(line)
    num_wrong = sum(result.check.wrong or 0 for result in results)
    rates = [_compute_rates(result)[1] for result in timed_results]
    yield f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}"
    yield f"# Avg bus bandwidth    : {fmean(rates):g}" if rates else "# Avg bus bandwidth    : N/A"


def _arrange_lines(results: Sequence[CaseResult]) -> list[dict[str, CaseResult]]:
    """Return the results in each line of a table, keyed by placement (in or out of place).

    A line has one data type, reduction, root and message size. Lines are sorted by these four.
    """
    lines: dict[tuple[str, str, int, int], dict[str, CaseResult]] = {}
    for result in results:
        params = _complete_params(result)
        key = params["dtype"], params["redop"], params["root"], params["size_bytes"]
        lines.setdefault(key, {})[params["placement"]] = result
    return [lines[key] for key in sorted(lines)]


def _render_line(line: Mapping[str, CaseResult]) -> str:
    """Return a line of a table as text: one message size with its results in both placements.

    ``line`` has the results, keyed by placement. The numbers of a missing placement are N/A.
    """
    result = next(iter(line.values()))
    params = _complete_params(result)
    size, dtype, redop = params["size_bytes"], params["dtype"], params["redop"]
    count: int | str = "N/A"  # The type of an imported result may be unknown.
    if dtype in DTYPES:
        is_sharded = OPERATIONS_BY_NAME[result.case.short_name].sharded
        count = size // DTYPES[dtype].itemsize // (result.num_ranks if is_sharded else 1)
    text = _LEADING_WIDTHS.format(
        size, count, TYPES.get(dtype, dtype), REDOPS.get(redop, redop), params["root"]
    )
    for placement in (OUT_OF_PLACE, IN_PLACE):
        if placement not in line:
            text += f"  {'N/A':>7}{'N/A':>8}{'N/A':>8}{'N/A':>8}"
            continue
        algbw, busbw = _compute_rates(line[placement])
        num_wrong = "0" if line[placement].check.passed else "N/A"
        microseconds = _get_mean_seconds(line[placement]) / MICRO
        text += f"  {microseconds:7.2f}  {algbw:6.2f}  {busbw:6.2f}{num_wrong:>8}"
    return text


def _get_mean_seconds(result: CaseResult) -> float:
    """Return the time of a case in seconds: the mean over ranks, as in nccl-tests.

    If this mean was not recorded, the result is the maximum over ranks. The time of the case must
    be known.
    """
    return result.value("rank_mean_time") or result.seconds or 0.0


def _compute_rates(result: CaseResult) -> tuple[float, float]:
    """Return (algbw, busbw) of a case in GB/s, from its size and its mean time over ranks."""
    algbw = (result.size_bytes or 0) / _get_mean_seconds(result) / GIGA
    factor = get_busbw_factor(result.case.short_name, result.num_ranks)
    return algbw, algbw if factor is None else factor * algbw
