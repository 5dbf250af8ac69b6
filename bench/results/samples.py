"""Each rank's samples of a record, ``samples/*.npz``: arrays of 64-bit integers, of few names and known shapes."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parbench.bench.files import file_name
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.text import format_size, reading

if TYPE_CHECKING:
    import numpy as np

STAMPS = ("arrival_ns", "exit_ns", "duration_ns", "issue_ns")
MAX_BYTES = 256 << 20


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
            arrays = _load_arrays(file)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        _check(arrays, record.world.size)
    return arrays


def _load_arrays(file: Path) -> "dict[str, np.ndarray[Any, Any]]":
    """Load the arrays of known names. Raises ``ValueError`` if the file is not an archive of arrays or is too large."""
    import numpy as np

    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
            raise ValueError(f"it holds more than {format_size(MAX_BYTES)} bytes")
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in ("ranks", "steps_per_sample", *STAMPS) if name in archive}


def _check(arrays: "dict[str, np.ndarray[Any, Any]]", size: int) -> None:
    """Raise ``ValueError`` if a type or a shape is not that of the samples of ``size`` ranks or fewer."""
    for name, array in arrays.items():
        if array.dtype != "int64":
            raise ValueError(f"{name} is an array of {array.dtype}, not of 64-bit integers")
    ranks = arrays.get("ranks")
    if ranks is None or ranks.ndim != 1 or len(ranks) > size:
        raise ValueError(f"its ranks are not a list of at most {size}")
    shapes = {arrays[name].shape for name in STAMPS if name in arrays}
    for shape in shapes:
        if len(shapes) > 1 or len(shape) != 2 or shape[0] != len(ranks) or not shape[1]:
            raise ValueError(f"its stamps are of shape {' and '.join(map(str, shapes))}, for {len(ranks)} ranks")
    steps = arrays.get("steps_per_sample")
    if steps is not None and (steps.ndim or steps < 1):
        raise ValueError("steps_per_sample is not a count")
