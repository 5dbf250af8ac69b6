"""Reads the JSON of nccl-tests, versions 1 to 4. Sizes and rates need no conversion."""

import json
import math
from pathlib import PurePath
from typing import Annotated

import msgspec

from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.text import UserError
from parbench.reports.formats.imported import UNKNOWN
from parbench.reports.formats.nccl_rows import (
    LogHeader,
    Number,
    RankLine,
    Row,
)

_VERSIONS = (1, 2, 3, 4)
"""The supported versions of the format."""
_PRECISION = 1e-4
"""The relative rounding error that is assumed for a number."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Number = float | str | None  # nccl-tests writes the text nan for an unknown number.


class _Numbers(msgspec.Struct, frozen=True):
    """The measured numbers of one placement: times in us, bandwidths in GB/s."""

    time: _Number = None
    """The time of one operation."""
    cpu_time: _Number = None
    """The time on the host, which replaces ``time`` where that is missing."""
    alg_bw: _Number = None
    """The algorithm bandwidth."""
    bus_bw: _Number = None
    """The bus bandwidth."""
    nwrong: _Number = None
    """The number of wrong elements."""

    def list_finite(self) -> dict[str, Number]:
        """Return the numbers of the placement that are finite, keyed by columns of the text format.

        The keys are ``time``, ``algbw``, ``busbw`` and ``#wrong``. Each number has its rounding
        error.
        """
        numbers = {
            "time": self.cpu_time if self.time is None else self.time,
            "algbw": self.alg_bw,
            "busbw": self.bus_bw,
            "#wrong": self.nwrong,
        }
        return {
            name: Number(number, _PRECISION * abs(number))
            for name, number in numbers.items()
            if isinstance(number, int | float) and math.isfinite(number)
        }


class _Iterations(msgspec.Struct, frozen=True):
    """The times of the single iterations of one placement, with those of the warm-up."""

    times_us: list[_Seconds] = []
    """The time of each iteration in us, the warm-up first."""
    skipped_iterations: _Count = 0
    """The number of iterations of the warm-up."""


class _Result(msgspec.Struct, frozen=True):
    """The results of one message size, in and out of place."""

    size: _Count
    """The message size in bytes."""
    type: str
    """The data type by its name in nccl-tests, such as ``float``."""
    redop: str
    """The reduction by its name in nccl-tests, or ``none``."""
    root: str
    """The root rank as text, ``-1`` for an operation without a root."""
    count: _Count | None = None
    """The number of elements."""
    out_of_place: _Numbers | None = None
    """The numbers of the out-of-place operation, None if they were not measured."""
    in_place: _Numbers | None = None
    """The numbers of the in-place operation, None if they were not measured."""
    out_of_place_per_iter: _Iterations | None = None
    """The times of the out-of-place iterations, None if they were not stored."""
    in_place_per_iter: _Iterations | None = None
    """The times of the in-place iterations, None if they were not stored."""
    actual_iterations: _Count | None = None
    """The number of timed iterations."""


class _Device(msgspec.Struct, frozen=True):
    """A device that nccl-tests used."""

    rank: int | None = None
    """The rank that uses it."""
    hostname: str | None = None
    """The host that has it."""


class _RunConfig(msgspec.Struct, frozen=True):
    """The options of nccl-tests and the devices that it used."""

    devices: list[_Device] = []
    """The devices, in the order of ranks."""
    nthreads: int = 1
    """The number of threads per process."""
    ngpus: int = 1
    """The number of GPUs per thread."""
    blocking_collectives: str = "false"
    """``true`` or ``false``, which nccl-tests writes as text."""

    def list_hosts(self) -> list[str]:
        """Return the name of the host of each rank, in the order of ranks, or ``unknown``.

        A process may list one of its devices, or all of them. With one, it stands for all ranks of
        the process.
        """
        ranks = [device.rank for device in self.devices]
        is_complete = len(ranks) > 1 and ranks == list(range(len(ranks)))
        num_ranks = 1 if is_complete else self.nthreads * self.ngpus
        return [device.hostname or UNKNOWN for device in self.devices for _ in range(num_ranks)]


class _NcclDocument(msgspec.Struct, frozen=True):
    """The content of a JSON file of nccl-tests."""

    version: int
    """The version of the format, 1 to 4."""
    config: _RunConfig
    """The options and the devices."""
    results: list[_Result]
    """The results, one for each message size."""
    args: list[str] = []
    """The command line of nccl-tests, first the path of the program."""
    env: list[str] = []
    """The environment variables as ``NAME=VALUE``."""
    nccl_version: int = 0
    """The version of NCCL as its headers encode it: 22809 for 2.28.9, 0 if unknown."""


def read_json(text: str, source: str) -> LogHeader:
    """Return the content of a JSON file of nccl-tests as a ``LogHeader``.

    A ``LogHeader`` is the table of results (``rows``) with the facts about the job. ``source`` is
    the name of the file, for errors. Raises ``UserError`` if the text is cut short, or if the
    version of its format is not one of 1 to 4.
    """
    document = _decode_document(text, source)
    config = document.config
    header = LogHeader(
        program=PurePath(document.args[0]).name if document.args else "",
        version=f"JSON version {document.version}",
        nccl=format_nccl_version(document.nccl_version),
        mode="blocking" if config.blocking_collectives == "true" else "pipelined",
        rank_lines=[
            RankLine(source, rank, 0, "", host, "") for rank, host in enumerate(config.list_hosts())
        ],
        variables=dict(word.split("=", 1) for word in document.env if "=" in word),
    )
    header.rows = [
        _convert_result(result, f"{source}, result {number}")
        for number, result in enumerate(document.results, start=1)
    ]
    return header


def _decode_document(text: str, source: str) -> _NcclDocument:
    """Return the content of a JSON file. Raises ``UserError`` for other text.

    ``source`` is the name of the file, for the error.
    """
    try:
        content = json.loads(text)
        version = content.get("version")
        if isinstance(version, int) and version not in _VERSIONS:
            raise UserError(
                f"{source}: JSON version {version} of nccl-tests is not supported. Versions up "
                f"to {_VERSIONS[-1]} are. Import what nccl-tests prints as text instead"
            )
        return msgspec.convert(content, _NcclDocument)
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, so the file seems to be cut short"
        raise UserError(f"{source}, line {error.lineno}: {problem}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{source} is not what nccl-tests writes: {error}") from error


def _convert_result(result: _Result, place: str) -> Row:
    """Return the row of one message size.

    ``place`` is the location of the result, for errors: ``FILE, result N``.
    """
    root = result.root.strip()
    if not root.removeprefix("-").isdecimal():
        raise UserError(f"{place}: root {root!r} is not a whole number")
    measured = ((OUT_OF_PLACE, result.out_of_place), (IN_PLACE, result.in_place))
    timed = {
        OUT_OF_PLACE: result.out_of_place_per_iter or _Iterations(),
        IN_PLACE: result.in_place_per_iter or _Iterations(),
    }
    return Row(
        place=place,
        size=result.size,
        count=result.count,
        type=result.type,
        redop=result.redop,
        root=int(root),
        iterations=result.actual_iterations,
        measurements={name: numbers.list_finite() for name, numbers in measured if numbers},
        samples={name: part.times_us[part.skipped_iterations :] for name, part in timed.items()},
        num_skipped=max((part.skipped_iterations for part in timed.values()), default=0),
    )


def format_nccl_version(code: int) -> str | None:
    """Return the version of NCCL that its headers encode: 22809 is 2.28.9. None if unknown."""
    if code < 1000:
        return None
    if code < 10000:  # Until 2.8 a minor version had one digit: 2708 is 2.7.8.
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
