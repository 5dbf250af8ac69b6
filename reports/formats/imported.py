"""The results of another tool, with sizes by the convention of nccl-tests."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parbench.bench.plan.catalogue import OPERATIONS, OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError

MICRO = 1e-6
UNKNOWN = "unknown"
OPERATIONS_BY_NAME = {spec.short_name: spec for spec in OPERATIONS}
"""The specification of each operation, keyed by its short name: ``all_reduce``."""
_PREFIXES = re.compile(
    r"^(?:\[\d+,\d+\]<std\w+>:\s?"  # mpirun --tag-output: [1,0]<stdout>:
    r"|\[pod/\S+\] "  # kubectl logs --prefix: [pod/NAME/CONTAINER]
    r"|\d{4}-\d\d-\d\dT\S+ "  # kubectl logs --timestamps
    r"| *\d+: ?)+"  # srun --label
)
"""The prefixes that launchers and log collectors add to each line."""


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
    """A result that another tool printed: the time of one case."""

    operation: OperationSpec
    """The operation of the case."""
    params: Mapping[str, Value]
    """The parameters of the case by name, such as ``size_bytes``, as nccl-tests counts the size."""
    seconds: float
    """The time of one operation in seconds."""
    check: Check = field(default_factory=Check)
    """The outcome of the tool's check of correctness, empty if the tool did not check."""
    notes: Sequence[str] = ()
    """Clauses about the conversion of the printed size and time, which reports show."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """The content of a file that another tool wrote: its results, and facts about the job."""

    version: str | None
    """The version of the tool, None if unknown."""
    num_ranks: int
    """The number of ranks of the job."""
    backend: str
    """The library that communicated, such as ``nccl`` or ``mpi``."""
    device: str
    """The device that held the messages: ``cuda``, ``cpu`` or the tool's name of it."""
    results: Sequence[ImportedResult]
    """The results in the order of the file."""
    hosts: Sequence[str] = ()
    """The names of the hosts, each once. Empty if the file does not state them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Facts about GPUs and libraries: ``gpu`` (its model) and ``nccl`` (its version)."""
    notes: Sequence[str] = ()
    """Sentences about content that was not imported or contradicts itself."""


def list_lines(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield (``SOURCE, line N``, line) for each line of a log.

    The prefixes of ``mpirun --tag-output``, ``srun --label`` and ``kubectl logs`` are removed.
    ``source`` is the name of the file.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        yield f"{source}, line {number}", _PREFIXES.sub("", line)


def parse_number(cell: str, place: str) -> float:
    """Return the number in a table cell as 0 or more. Raises ``UserError`` for any other text.

    ``place`` is the location of the cell, for the error: ``FILE, line N``.
    """
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"{place}: {cell!r} is not a number from 0 up")
    return number


def resolve_num_ranks(num_listed: int | None, nproc: int | None, source: str) -> int:
    """Return the number of ranks that a file or the option ``--nproc`` states.

    Args:
        num_listed: the number of ranks that the file lists, None if it lists none.
        nproc: the value of ``--nproc``, None if not given.
        source: the name of the file, for errors.

    Raises ``UserError`` if neither states the number, or if both do and differ.
    """
    if num_listed is not None and nproc is not None and num_listed != nproc:
        problem = f"was measured on {num_listed} ranks, and --nproc is {nproc}"
        raise UserError(f"{source} {problem}: leave --nproc out")
    num_ranks = nproc if num_listed is None else num_listed
    if num_ranks is None:
        problem = "does not state the number of ranks, which bandwidths depend on"
        raise UserError(f"{source} {problem}: add --nproc N")
    return num_ranks
