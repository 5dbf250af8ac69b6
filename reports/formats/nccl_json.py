"""Reads the JSON of nccl-tests, versions 1 to 4. Sizes need no conversion."""

from pathlib import PurePath
from typing import Annotated

import msgspec

from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE
from parbench.bench.text import UserError
from parbench.reports.formats.imported import UNKNOWN
from parbench.reports.formats.nccl_table import NcclNumbers, NcclRank, NcclRow, NcclTable

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Number = _Amount | str | None  # nccl-tests writes the text nan for an unknown number.


class _Numbers(msgspec.Struct, frozen=True):
    """The measured numbers of one placement."""

    time: _Number = None
    """The time of one operation in us."""
    bus_bw: _Number = None
    """The bus bandwidth in GB/s."""
    nwrong: _Number = None
    """The number of wrong elements."""


class _Result(msgspec.Struct, frozen=True):
    """The results of one message size, in and out of place."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    """The message size in bytes."""
    type: str
    """The data type by its name in nccl-tests, such as ``float``."""
    redop: str
    """The reduction by its name in nccl-tests, or ``none``."""
    root: str
    """The root rank as text, ``-1`` for an operation without a root."""
    out_of_place: _Numbers | None = None
    """The numbers of the out-of-place operation, None if they were not measured."""
    in_place: _Numbers | None = None
    """The numbers of the in-place operation, None if they were not measured."""


class _Device(msgspec.Struct, frozen=True):
    """A device that nccl-tests used."""

    rank: int | None = None
    """The rank that uses it."""
    hostname: str = UNKNOWN
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


class _NcclDocument(msgspec.Struct, frozen=True):
    """The content of a JSON file of nccl-tests."""

    version: Annotated[int, msgspec.Meta(ge=1, le=4)]
    """The version of the format."""
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


def read_json(text: str, source: str) -> NcclTable:
    """Return the table that a JSON file of nccl-tests contains, with the facts about the job.

    ``source`` is the name of the file, for errors. Raises ``UserError`` if the text is cut short,
    or if the version of its format is not one of 1 to 4.
    """
    try:
        document = msgspec.json.decode(text, type=_NcclDocument)
    except msgspec.DecodeError as error:
        problem = "is not JSON that nccl-tests writes in its versions 1 to 4"
        raise UserError(f"{source} {problem}: {error}") from error
    return NcclTable(
        program=PurePath(document.args[0]).name if document.args else "",
        version=f"JSON version {document.version}",
        nccl=decode_nccl_version(document.nccl_version),
        mode="blocking" if document.config.blocking_collectives == "true" else "pipelined",
        ranks=_list_ranks(document.config),
        variables=dict(word.split("=", 1) for word in document.env if "=" in word),
        rows=[
            _convert_result(result, f"{source}, result {number}")
            for number, result in enumerate(document.results, start=1)
        ],
    )


def decode_nccl_version(code: int) -> str | None:
    """Return the version of NCCL that its headers encode: 22809 is 2.28.9. None for 0."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}" if code else None


def _list_ranks(config: _RunConfig) -> list[NcclRank]:
    """Return all ranks with their hosts.

    A process may list all of its devices, or one that stands for all ranks of the process.
    """
    numbers = [device.rank for device in config.devices]
    is_complete = len(numbers) > 1 and numbers == list(range(len(numbers)))
    num_ranks = 1 if is_complete else config.nthreads * config.ngpus
    hosts = [device.hostname for device in config.devices for _ in range(num_ranks)]
    return [NcclRank(number, host, "") for number, host in enumerate(hosts)]


def _convert_result(result: _Result, place: str) -> NcclRow:
    """Return the row of one message size. ``place`` is its location: ``FILE, result N``."""
    root = result.root.strip()
    if not root.removeprefix("-").isdecimal():
        raise UserError(f"{place}: root {root!r} is not a whole number")
    measurements = {}
    for placement, numbers in (
        (OUT_OF_PLACE, result.out_of_place),
        (IN_PLACE, result.in_place),
    ):
        if numbers is not None and isinstance(numbers.time, float):
            measurements[placement] = NcclNumbers(
                time=numbers.time,
                busbw=numbers.bus_bw if isinstance(numbers.bus_bw, float) else None,
                num_wrong=int(numbers.nwrong) if isinstance(numbers.nwrong, float) else None,
            )
    return NcclRow(
        place=place,
        size=result.size,
        type=result.type,
        redop=result.redop,
        root=int(root),
        measurements=measurements,
    )
