"""Checks that the numbers of nccl-tests agree with each other, and converts its rows to results."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePath
from typing import NamedTuple

from parbench.bench.plan.catalogue import DTYPES, IN_PLACE, OUT_OF_PLACE, OperationSpec
from parbench.bench.plan.groups import form_groups
from parbench.bench.plan.params import Value
from parbench.bench.results.formatting import GIGA
from parbench.bench.results.records import Check
from parbench.bench.text import UserError, format_list, pluralize
from parbench.reports.formats.imported import (
    MICRO,
    OPERATIONS_BY_NAME,
    UNKNOWN,
    ImportedResult,
    make_metrics,
    resolve_num_ranks,
)
from parbench.reports.formats.nccl_tests import PROGRAMS, REDOPS, TYPES

PLACEMENTS = (OUT_OF_PLACE, IN_PLACE)
"""The placements in the order of the columns of nccl-tests."""
RATES = ("algbw", "busbw")
"""The columns of a row that are bandwidths, in GB/s."""
REBUILD_HINT = "If mpirun started several ranks, build nccl-tests with: make MPI=1"
_OPERATIONS = {program: name for name, program in PROGRAMS.items()}
"""The operation, such as ``all_reduce``, keyed by program, such as ``all_reduce_perf``."""
_DTYPES = {nccl_type: dtype for dtype, nccl_type in TYPES.items()}
"""The torch dtype of each type, keyed by the name in nccl-tests: ``half`` is ``float16``."""
_REDOPS = {nccl_redop: redop for redop, nccl_redop in REDOPS.items()}
"""The reduction of each redop, keyed by the name in nccl-tests: ``prod`` is ``product``."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""The operations for which nccl-tests prints a root rank."""
_EXPORT_FACTS = ("parbench", "mode", "backend", "device", "nodes", "world")
"""The fields of a parbench export that describe the run and are not parameters of a case."""
_MAX_ERRORS = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
"""The largest absolute error that nccl-tests accepted before version 2.13, keyed by type.

Types that are not listed must have no error.
"""
_RATE_TOLERANCE = 1e-4
"""The relative error that is allowed between a printed bandwidth and size over time."""
_MAX_GUESSED_RANKS = 1024
"""Numbers of ranks from 2 to below this limit are compared with the printed bandwidths."""


class Number(NamedTuple):
    """A printed number with its rounding error."""

    value: float
    """The number as printed."""
    half_step: float
    """Half a unit of the last printed digit: 0.05 for ``12.3``."""

    @property
    def low(self) -> float:
        """The least exact value that rounds to the printed number, at least 0."""
        return max(self.value - self.half_step, 0.0)

    @property
    def high(self) -> float:
        """The greatest exact value that rounds to the printed number."""
        return self.value + self.half_step


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table of nccl-tests: the results of one message size, in and out of place.

    None stands for a column that the table lacks.
    """

    place: str
    """The location of the line for error messages: ``FILE, line N`` or ``FILE, result N``."""
    size: int
    """The message size in bytes."""
    type: str
    """The data type by its name in nccl-tests, such as ``float``."""
    count: int | None = None
    """The number of elements."""
    redop: str | None = None
    """The reduction by its name in nccl-tests, such as ``sum``, or ``none``."""
    root: int | None = None
    """The root rank, -1 for an operation without a root."""
    measurements: Mapping[str, Mapping[str, Number]]
    """The printed numbers, keyed by placement (``out_of_place``, ``in_place``) and by column.

    The columns are ``time`` in us, ``algbw`` and ``busbw`` in GB/s, and ``#wrong`` (the number of
    wrong elements) or, in old versions, ``error`` (the largest absolute error). A number that was
    printed as N/A is left out.
    """
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The time of each iteration in us without warm-up, keyed by placement.

    Only JSON has these times.
    """
    num_skipped: int = 0
    """The number of warm-up iterations that are not in ``samples``."""
    iterations: int | None = None
    """The number of timed iterations."""


class RankLine(NamedTuple):
    """A line above a table in which nccl-tests lists one rank and its GPU."""

    place: str
    """The location of the line for error messages: ``FILE, line N``, in JSON the file."""
    rank: int
    """The number of the rank: global, or within its group if several groups have a rank 0."""
    group: int
    """The number of the group by ``NCCL_TESTS_SPLIT``, 0 without groups."""
    pid: str
    """The id of the process as text, empty in JSON."""
    host: str
    """The name of the host, or ``unknown``."""
    gpu: str
    """The model of the GPU, empty if the line does not state it."""


@dataclass(kw_only=True)
class LogHeader:
    """A table of nccl-tests: the facts that are printed above it, its rows and its average."""

    program: str = ""
    """The program of nccl-tests, such as ``all_reduce_perf``.

    Empty if the file does not name it.
    """
    version: str | None = None
    """The version of nccl-tests, None if unknown."""
    nccl: str | None = None
    """The version of NCCL, such as ``2.28.9``. None if unknown."""
    mode: str = "pipelined"
    """The mode of the cases: ``pipelined`` or ``blocking``.

    A parbench export can state another mode.
    """
    repeated_placement: str = ""
    """The placement whose columns only repeat the other placement, in an export of parbench.

    It was not measured, so it is not imported. Empty if both placements were measured.
    """
    is_reversed: bool = False
    """True if the in-place columns come before the out-of-place columns."""
    rank_lines: list[RankLine] = field(default_factory=list)
    """The lines that list the ranks, in the order of the file. Empty if the file lists none."""
    export_fields: dict[str, str] = field(default_factory=dict)
    """The facts and parameters that parbench writes above a table that it exports, by name.

    The facts are ``parbench`` (its version), ``mode``, ``backend``, ``device``, ``nodes`` and
    ``world``. Empty for a file that parbench did not export.
    """
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the job by name, which only JSON contains."""
    rows: list[Row] = field(default_factory=list)
    """The rows of the table in the order of the file."""
    average_busbw: Number | None = None
    """The average bus bandwidth in GB/s that is printed below the table, None if it is missing."""

    def list_numbers(self, column: str) -> list[Number | None]:
        """Return the numbers of a column of the table, in the order of rows and then of placements.

        ``column`` is a key of ``Row.measurements``, such as ``busbw``. The number is None where a
        row does not have it.
        """
        return [numbers.get(column) for row in self.rows for numbers in row.measurements.values()]

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that the ranks ran on, each once. ``unknown`` is left out."""
        names = dict.fromkeys(line.host for line in self.rank_lines)
        return [host for host in names if host != UNKNOWN]

    @property
    def environment(self) -> dict[str, str]:
        """The models of the GPUs (key ``gpu``) and the version of NCCL (key ``nccl``) as text.

        A fact that is unknown has no key.
        """
        gpus = ", ".join(dict.fromkeys(line.gpu for line in self.rank_lines))
        is_on_gpus = self.export_fields.get("device", "cuda") == "cuda"
        facts = {"gpu": gpus if is_on_gpus else "", "nccl": self.nccl}
        return {name: value for name, value in facts.items() if value and value != UNKNOWN}

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the job, None if unknown. A group may be only a part of them."""
        world = self.export_fields.get("world", "")
        return int(world) if world.isdecimal() else len(self.rank_lines) or None

    @property
    def method(self) -> str:
        """A phrase about how the printed times were computed, for the metrics of the results."""
        if self.export_fields:
            return f"exported by parbench {self.export_fields['parbench']}"
        version = self.version or "of unknown version"
        return f"mean over iterations and ranks, nccl-tests {version}"

    def list_groups(self) -> list[list[int]]:
        """Return the ranks of each group of ``NCCL_TESTS_SPLIT``, in the order of group numbers.

        The ranks of a group are sorted. A job without groups gives one list of all ranks. The
        result is empty if the file lists no ranks. Raises ``UserError`` if a rank occurs twice or
        is missing, or if groups differ in size.
        """
        self._check_ranks()
        groups: dict[int, list[int]] = {}
        for line in self.rank_lines:
            groups.setdefault(line.group, []).append(line.rank)
        sizes = {len(ranks) for ranks in groups.values()}
        if len(sizes) > 1:
            place = self.rank_lines[0].place
            counts = format_list(sorted(sizes), "and")
            raise UserError(f"{place}: groups of {counts} ranks cannot be imported together")
        return [sorted(groups[number]) for number in sorted(groups)]

    def _check_ranks(self) -> None:
        """Raise ``UserError`` if a rank is listed twice, or if a rank below the highest is missing.

        A rank may occur once per group if the ranks are numbered within their groups, which is so
        if each rank 0 is in another group.
        """
        numbers = [line.rank for line in self.rank_lines]
        is_per_group = len(set(numbers)) < len(numbers) and 0 < len(
            {line.group for line in self.rank_lines if line.rank == 0}
        ) == numbers.count(0)
        line_by_rank: dict[tuple[int, int], RankLine] = {}
        for line in self.rank_lines:
            key = line.rank, line.group if is_per_group else 0
            if key in line_by_rank:
                first = line_by_rank[key]
                processes = f"{first.host} pid {first.pid}, {line.host} pid {line.pid}"
                raise UserError(
                    f"{line.place}: rank {line.rank} occurs twice ({processes}), so several jobs "
                    f"wrote this log and their rows cannot be separated. {REBUILD_HINT}"
                )
            line_by_rank[key] = line
        missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
        if missing:
            ranks = format_list(missing[:3], "and")
            raise UserError(f"{self.rank_lines[-1].place}: no line lists rank {ranks}")


def parse_printed(text: str) -> Number | None:
    """Return a printed number with its rounding error, None for N/A, NaN and infinity.

    Raises ``ValueError`` for other text.
    """
    if text.lower() in ("n/a", "nan", "-nan", "inf"):
        return None
    value = float(text)
    if not math.isfinite(value):
        return None
    exponent = Decimal(text).as_tuple().exponent
    return Number(value, 0.5 * 10.0 ** int(exponent))


def convert_table(
    header: LogHeader, source: str, nproc: int | None
) -> tuple[list[ImportedResult], list[str]]:
    """Return the results of a table, and sentences about numbers in it that contradict each other.

    A row that contradicts itself is left out and named in a sentence. If all rows agree with
    another number of ranks than the file lists, they are kept. Raises ``UserError`` if the
    operation or the number of ranks is unknown, or if all rows contradict themselves.

    Args:
        header: the table with the facts above it. It has at least one row.
        source: the path of the file, for messages and to recognize the operation.
        nproc: the number of ranks that the user gave with ``--nproc``, None if not given.
    """
    groups = header.list_groups()
    place = header.rows[0].place
    group_size = len(groups[0]) if groups else None
    if group_size is None and nproc is None:
        raise UserError(_describe_unknown_ranks(header, source, place))
    num_ranks = resolve_num_ranks(group_size, None if len(groups) > 1 else nproc, place)
    notes: list[str] = []
    operation = _find_operation(header, source, num_ranks, notes)
    params: dict[str, Value] = {}
    if len(groups) > 1:
        params = _describe_groups(groups)
    results: list[ImportedResult] = []
    contradictions: list[str] = []
    fitting_ranks = list_fitting_ranks(header.rows, operation)
    is_other_world = bool(fitting_ranks) and num_ranks not in fitting_ranks
    for row in header.rows:
        contradiction = None
        if not header.export_fields:  # Parbench exports medians, of each column by itself.
            contradiction = find_contradiction(row, operation, num_ranks)
        if contradiction:
            contradictions.append(f"{row.place}: {contradiction}")
        if is_other_world or not contradiction:
            results += _make_results(header, row, operation, num_ranks, params, is_other_world)
    if contradictions and is_other_world:
        contradictions[0] += _describe_other_world(num_ranks, fitting_ranks)
    if contradictions and not results:
        raise UserError(contradictions[0])
    notes += _check_num_ranks(num_ranks, len(fitting_ranks))
    return results, [*notes, *contradictions, *_check_average(header)]


def _describe_unknown_ranks(header: LogHeader, source: str, place: str) -> str:
    """Return the error message for a table that does not list its ranks, if ``--nproc`` is missing.

    If the bandwidths of the rows agree with only one number of ranks, the message suggests it.
    ``place`` is the location of the table.
    """
    problem = f"{place}: {source} does not state the number of ranks: add --nproc N"
    operation = OPERATIONS_BY_NAME.get(_OPERATIONS.get(header.program, ""))
    if operation is None:
        return problem
    fitting = list_fitting_ranks(header.rows, operation)
    if len(fitting) == 1:
        return f"{problem}. The printed numbers agree only with --nproc {fitting[0]}"
    return problem


def _find_operation(
    header: LogHeader, source: str, num_ranks: int, notes: list[str]
) -> OperationSpec:
    """Return the operation of a table, by the program that the file names.

    Without a program, it is the operation that agrees with all rows on ``num_ranks`` ranks. If
    several agree, the name of the file (``source``) decides. Then a sentence about this is added to
    ``notes``. Raises ``UserError`` for an unknown program, or if not exactly one operation remains.
    """
    if header.program:
        operation = OPERATIONS_BY_NAME.get(_OPERATIONS.get(header.program, ""))
        if operation is None:
            known_programs = format_list(PROGRAMS.values(), "and")
            raise UserError(
                f"{header.rows[0].place}: {header.program} has no equivalent case; "
                f"the programs with one are {known_programs}"
            )
        return operation
    candidates = [
        OPERATIONS_BY_NAME[name]
        for name in PROGRAMS
        if _explains_rows(OPERATIONS_BY_NAME[name], header.rows, num_ranks)
    ]
    file_name = PurePath(source).name.lower().replace("_", "")
    named_specs = [spec for spec in candidates if spec.short_name.replace("_", "") in file_name]
    if len(candidates) > 1 and named_specs:
        candidates = [max(named_specs, key=lambda spec: len(spec.short_name))]
    if len(candidates) == 1:
        program = PROGRAMS[candidates[0].short_name]
        notes.append(f"the file does not name its program: the columns are those of {program}")
        return candidates[0]
    programs = [PROGRAMS[spec.short_name] for spec in candidates]
    cause = f"it may be {format_list(programs)}" if programs else "its numbers fit none"
    example = programs[0] if programs else "all_reduce_perf"
    raise UserError(
        f"{header.rows[0].place}: the file does not name the program of nccl-tests: {cause}. "
        f"Add the line '# Collective test starting: {example}' before the table"
    )


def _explains_rows(operation: OperationSpec, rows: Sequence[Row], num_ranks: int) -> bool:
    """Return True if an operation on ``num_ranks`` ranks can have printed these rows.

    The columns root and redop must fit the operation. In each row, algbw must be size over time,
    and busbw must be algbw times the operation's factor for this number of ranks.
    """
    is_rooted = operation.short_name in _ROOTED
    for row in rows:
        has_root = row.root is not None and row.root >= 0
        is_reduction = row.redop not in (None, "none")
        if has_root != is_rooted or is_reduction != operation.is_reduction:
            return False
        if find_contradiction(row, operation, num_ranks):
            return False
    return True


def list_fitting_ranks(rows: Sequence[Row], operation: OperationSpec) -> list[int]:
    """Return the numbers of ranks, from 2 to 1023, that explain the busbw column of all rows.

    busbw is algbw times a factor that depends on the number of ranks, such as 2 (n - 1) / n for
    all_reduce. ``operation`` has this factor. All numbers are returned if the rows do not depend on
    it, and none if a row contradicts itself.
    """
    return [
        num_ranks
        for num_ranks in range(2, _MAX_GUESSED_RANKS)
        if not any(find_contradiction(row, operation, num_ranks) for row in rows)
    ]


def _check_num_ranks(num_ranks: int, num_fitting: int) -> Iterator[str]:
    """Yield a sentence if one rank is listed, or if the rows agree with every number of ranks.

    Args:
        num_ranks: the number of ranks that the file lists, or that the user gave.
        num_fitting: the length of the list that ``list_fitting_ranks`` returned.
    """
    if num_ranks == 1:
        yield f"1 rank transfers nothing, so bus bandwidths are 0. {REBUILD_HINT}"
    elif num_fitting == _MAX_GUESSED_RANKS - 2:
        yield f"{num_ranks} ranks are listed, and no number of the table confirms their count"


def _describe_other_world(num_ranks: int, fitting_ranks: Sequence[int]) -> str:
    """Return the end of a message: busbw of all rows implies another number of ranks.

    Args:
        num_ranks: the number of ranks that the file lists.
        fitting_ranks: the numbers of ranks that explain busbw of all rows, ascending.
    """
    fitting = f"{fitting_ranks[0]} ranks"
    if len(fitting_ranks) > 1:
        fitting = f"{fitting_ranks[0]} to {fitting_ranks[-1]} ranks"
    return (
        f". The numbers of all rows agree with {fitting}, but the file lists {num_ranks}: "
        "lines may be missing. Bus bandwidths are as printed"
    )


def find_contradiction(row: Row, operation: OperationSpec, num_ranks: int) -> str | None:
    """Return a sentence about numbers of a row that contradict each other, None if they agree.

    The redop must fit the operation, and the number of elements must fit the bytes. algbw must be
    size over time, and busbw must be algbw times the operation's factor for ``num_ranks`` ranks.
    """
    if row.redop == "none" and operation.is_reduction:
        return f"redop {row.redop!r} contradicts {operation.short_name}, which is a reduction"
    return _check_count(row, operation, num_ranks) or _check_rates(row, operation, num_ranks)


def _check_count(row: Row, operation: OperationSpec, num_ranks: int) -> str | None:
    """Return a sentence if the number of elements of a row contradicts its bytes, otherwise None.

    The bytes of a sharded operation, such as all_gather, are those of all ranks, but the elements
    are those of one rank.
    """
    dtype = DTYPES.get(_DTYPES.get(row.type, ""))
    if row.count is None or dtype is None or operation.short_name == "all_to_all_v":
        return None
    shards = num_ranks if operation.sharded else 1
    expected = row.count * dtype.itemsize * shards
    if expected == row.size:
        return None
    ranks = f" for each of {num_ranks} ranks" if operation.sharded else ""
    return (
        f"the size is {row.size} B, but {row.count} elements of {row.type}{ranks} are {expected} B"
    )


def _check_rates(row: Row, operation: OperationSpec, num_ranks: int) -> str | None:
    """Return a sentence about a printed bandwidth that contradicts size and time, otherwise None.

    algbw must be size over time, and busbw must be algbw times the operation's factor for
    ``num_ranks`` ranks. Differences that rounding of the printed numbers explains are allowed.
    """
    factor = operation.busbw.compute(num_ranks) if operation.busbw else 1.0
    for placement, numbers in row.measurements.items():
        time, algbw, busbw = map(numbers.get, ("time", *RATES))
        if time is None:
            continue
        low = row.size / (time.high * MICRO) / GIGA
        high = row.size / (time.low * MICRO) / GIGA if time.low else math.inf
        name = placement.replace("_", "-")
        # Until 2020 nccl-tests printed busbw also as the algbw of sharded operations.
        is_old_algbw = operation.sharded and algbw == busbw
        if algbw and not is_old_algbw and not _overlaps(algbw, low, high):
            return (
                f"{name} algbw {algbw.value:g} GB/s contradicts {row.size} B "
                f"in {time.value:g} us, which are {low:.4g} GB/s"
            )
        if algbw and not is_old_algbw:
            low, high = max(low, algbw.low), min(high, algbw.high)
        if busbw and not _overlaps(busbw, factor * low, factor * high):
            return (
                f"{name} busbw {busbw.value:g} GB/s contradicts {factor * low:.4g} GB/s, "
                f"which {operation.short_name} on {pluralize(num_ranks, 'rank')} implies"
            )
    return None


def _overlaps(printed: Number, low: float, high: float) -> bool:
    """Return True if the exact value of a printed number may lie between ``low`` and ``high``.

    The exact value is within the rounding error of the printed one. Both bounds have a relative
    tolerance of 0.01 %.
    """
    return printed.high >= low * (1 - _RATE_TOLERANCE) and printed.low <= high * (
        1 + _RATE_TOLERANCE
    )


def _check_average(header: LogHeader) -> Iterator[str]:
    """Yield a sentence if the printed average bus bandwidth differs from the mean over all rows."""
    average = header.average_busbw
    rates = header.list_numbers("busbw")
    if average is None or not rates or None in rates or header.export_fields:
        return
    low = sum(rate.low for rate in rates if rate) / len(rates)
    high = sum(rate.high for rate in rates if rate) / len(rates)
    if not _overlaps(average, low, high):
        yield (
            f"the file states an average busbw of {average.value:g} GB/s, "
            f"but that of its rows is {(low + high) / 2:.4g} GB/s: rows may be missing"
        )


def _describe_groups(groups: Sequence[Sequence[int]]) -> dict[str, Value]:
    """Return the parameters ``concurrent`` and ``group`` of cases, by name.

    ``concurrent`` is True, because all groups communicated at the same time. ``group`` describes
    groups of K ranks: ``contiguous:K`` for successive ranks, ``strided:K`` for ranks at equal
    distances, such as 0, 2, 4, 6. It is left out if the groups are formed in another way.
    ``groups`` has the ranks of each group.
    """
    num_ranks = sum(map(len, groups))
    size = len(groups[0])
    for text in (f"strided:{size}", f"contiguous:{size}"):
        if sorted(form_groups(text, num_ranks)) == sorted(map(tuple, groups)):
            return {"group": text, "concurrent": True}
    return {"concurrent": True}


def _make_results(
    header: LogHeader,
    row: Row,
    operation: OperationSpec,
    num_ranks: int,
    group_params: Mapping[str, Value],
    is_other_world: bool,
) -> Iterator[ImportedResult]:
    """Yield a result for each placement that was measured in a row.

    Args:
        header: the table with the facts above it.
        row: the row, whose numbers were checked.
        operation: the operation of the table.
        num_ranks: the number of ranks of a group.
        group_params: the parameters about groups, by name. Empty without groups.
        is_other_world: True if the bandwidths imply another number of ranks than ``num_ranks``.
            Then busbw is copied as printed, not computed.
    """
    params = {**_make_params(header, row, operation), **group_params}
    for placement, numbers in row.measurements.items():
        if placement == header.repeated_placement or not numbers:
            continue
        printed = {name: number.value for name, number in numbers.items()}
        for name, value in printed.items():
            if value < 0:
                raise UserError(f"{row.place}: {name} {value:g} at {row.size} B is negative")
        num_wrong = printed.get("#wrong", 0.0)
        if not num_wrong.is_integer():
            raise UserError(f"{row.place}: #wrong {num_wrong:g} is not a whole number")
        rates = {name: printed[name] * GIGA for name in RATES if name in printed}
        is_old_algbw = operation.sharded and printed.get("algbw") == printed.get("busbw")
        if is_old_algbw or is_other_world:
            rates.pop("algbw", None)
        steps = [2 * numbers[name].half_step for name in rates]
        time = printed.get("time")
        yield ImportedResult(
            name=operation.name,
            params={**params, "placement": placement},
            group_size=None if header.world_size in (num_ranks, None) else num_ranks,
            metrics=make_metrics(
                operation,
                num_ranks,
                row.size,
                None if time is None else time * MICRO,
                header.method,
                rates,
                0.0 if is_other_world else max(steps, default=0.0) * GIGA,
            ),
            check=_make_check(row, printed),
            samples=[sample * MICRO for sample in row.samples.get(placement, ())],
            iterations=row.iterations,
            printed=printed,
            notes=_make_notes(row),
        )


def _make_check(row: Row, printed: Mapping[str, float]) -> Check:
    """Return the result of the correctness check of a placement, empty if nothing was checked.

    ``printed`` has the numbers of the placement by column. The check passes without wrong elements
    or, in old versions, if the largest error is small enough for the data type.
    """
    if "#wrong" in printed:
        num_wrong = int(printed["#wrong"])
        return Check(passed=num_wrong == 0, wrong=num_wrong)
    if "error" in printed:
        return Check(passed=printed["error"] <= _MAX_ERRORS.get(row.type, 0.0))
    return Check()


def _make_params(header: LogHeader, row: Row, operation: OperationSpec) -> dict[str, Value]:
    """Return the parameters of a row's case by name, such as ``size_bytes`` and ``dtype``.

    The placement (in or out of place) and parameters about groups of ranks are added later.
    """
    params: dict[str, Value] = {
        "size_bytes": row.size,
        "dtype": _DTYPES.get(row.type, row.type),
        "mode": header.mode,
    }
    if operation.is_reduction and row.redop is not None:
        params["redop"] = _REDOPS.get(row.redop, row.redop)
    if row.root is not None and row.root >= 0:
        params["root"] = row.root
    for name, text in header.export_fields.items():
        if name not in _EXPORT_FACTS:
            params[name] = text
    return params


def _make_notes(row: Row) -> list[str]:
    """Return sentences about a message size of 0 and about iterations skipped as warm-up."""
    notes = []
    if row.size == 0:
        notes.append("size 0: nccl-tests rounds the share of each rank down to 16 bytes")
    if row.num_skipped:
        notes.append(f"the first {row.num_skipped} iterations are warm-up, by --per_iter_skip")
    return notes
