"""Each rank's samples of a record, ``samples/*.npz``: arrays of whole numbers, of few names and known shapes."""

import math
import re
import zipfile
from typing import TYPE_CHECKING, Any

from parbench.bench.files import file_name
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.text import format_size, reading

if TYPE_CHECKING:
    import numpy as np

STAMPS = ("arrival_ns", "exit_ns", "duration_ns", "issue_ns")
_MOST_BYTES = 256 << 20
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<i8', 'fortran_order': False, 'shape': \((\d{0,12})(?:, ?(\d{0,12}))?\), \} *\n",
    re.DOTALL,
)


def samples_name(record: Record) -> str:
    return f"samples/{file_name(record.case.id)}-{record.launch}.npz"


def load_rank_samples(run: Run, record: Record) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the arrays in a record's file of samples, none where none was written; ``UserError`` if it is damaged.

    ``ranks`` are those measured; ``STAMPS`` have a row for each of them and a column for each sample of
    ``steps_per_sample`` steps. All are 64-bit integers.
    """
    file = run.path / samples_name(record)
    with reading(file, "holds no samples that can be read"):
        if not file.exists():
            return {}
        try:
            with zipfile.ZipFile(file) as packed:
                found = {
                    name: one
                    for name in ("ranks", "steps_per_sample", *STAMPS)
                    if (one := _array(packed, name)) is not None
                }
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise ValueError(str(error)) from error
        _check(found, record.world.size)
    return found


def _array(packed: zipfile.ZipFile, name: str) -> "np.ndarray[Any, Any] | None":
    """Return an array, None if there is none of the name; its shape is believed where so many bytes are there."""
    import numpy as np

    try:
        member = packed.getinfo(f"{name}.npy")
    except KeyError:
        return None
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by method {member.compress_type}")
    with packed.open(member) as content:
        found = content.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise ValueError(f"{name} holds more than {format_size(_MOST_BYTES)} bytes")
    head = _HEADER.match(found)
    if head is None:
        raise ValueError(f"{name} is no array of 64-bit integers in at most two dimensions")
    shape = tuple(int(one) for one in head.groups() if one)
    values = len(found) - head.end()
    if math.prod(shape) * 8 != values:
        raise ValueError(f"{name} is of shape {shape}, and has {values} bytes")
    return np.frombuffer(found, "<i8", offset=head.end()).reshape(shape)


def _check(found: "dict[str, np.ndarray[Any, Any]]", size: int) -> None:
    if (ranks := found.get("ranks")) is None or ranks.ndim != 1:
        raise ValueError("it does not tell its ranks")
    if not len({*ranks.tolist()}) == len(ranks) <= size or any(rank < 0 for rank in ranks.tolist()):
        raise ValueError(f"its ranks are not at most {size}, each told once")
    shapes = {found[name].shape for name in STAMPS if name in found}
    for shape in shapes:
        if len(shapes) > 1 or len(shape) != 2 or shape[0] != len(ranks) or not shape[1]:
            raise ValueError(f"its stamps are of shape {' and '.join(map(str, shapes))}, for {len(ranks)} ranks")
    steps = found.get("steps_per_sample")
    if steps is not None and (steps.ndim or steps < 1):
        raise ValueError("steps_per_sample is no count")
