"""The results of another tool, with sizes by the convention of nccl-tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parbench.bench.plan.catalogue import OPERATIONS, OperationSpec
from parbench.bench.plan.params import Value
from parbench.bench.results.records import Check
from parbench.bench.text import UserError

MICRO = 1e-6
UNKNOWN = "unknown"
OPERATIONS_BY_NAME = {spec.short_name: spec for spec in OPERATIONS}
"""The specification of each operation, keyed by its short name: ``all_reduce``."""


@dataclass(frozen=True, kw_only=True)
class ImportedResult:
    """A result that another tool printed: the time of one case."""

    operation: OperationSpec
    """The operation of the case."""
    params: Mapping[str, Value]
    """The parameters of the case by name, with its ``size_bytes``."""
    seconds: float
    """The time of one operation in seconds."""
    check: Check = field(default_factory=Check)
    """The tool's check of correctness. It is empty if the tool did not check."""
    notes: Sequence[str] = ()
    """Sentences about the conversion of size and time, which reports show."""


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
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the job by name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Facts about GPUs and libraries: ``gpu`` (its model) and ``nccl`` (its version)."""
    notes: Sequence[str] = ()
    """Sentences about content that was not imported or contradicts itself."""


def parse_number(cell: str, place: str) -> float:
    """Return the number in a cell, 0 or more. Raises ``UserError`` for other text.

    ``place`` is the location of the cell, for the error: ``FILE, line N``.
    """
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"{place}: {cell!r} is not a number from 0 up")
    return number


def resolve_num_ranks(in_file: int | None, nproc: int | None, source: str) -> int:
    """Return the number of ranks that a file or the option ``--nproc`` states.

    Args:
        in_file: the number of ranks in the file, None if the file does not state it.
        nproc: the value of ``--nproc``, None if not given.
        source: the name of the file, for errors.

    Raises ``UserError`` if neither states it, or if they differ.
    """
    if in_file is not None and nproc is not None and in_file != nproc:
        problem = f"was measured on {in_file} ranks, and --nproc is {nproc}"
        raise UserError(f"{source} {problem}: leave --nproc out")
    num_ranks = nproc if in_file is None else in_file
    if num_ranks is None:
        problem = "does not state the number of ranks, which bandwidths depend on"
        raise UserError(f"{source} {problem}: add --nproc N")
    return num_ranks
