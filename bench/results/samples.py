"""The samples of each rank in a record, ``samples/*.npz``: arrays of 64-bit integers."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parbench.bench.files import convert_read_errors, make_file_name
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run

if TYPE_CHECKING:
    import numpy as np

STAMPS = ("arrival_ns", "exit_ns", "duration_ns", "issue_ns")


def make_samples_path(record: Record) -> str:
    """Return the path of the samples in the folder of the run."""
    return f"samples/{make_file_name(record.case.id)}-{record.repetition}.npz"


def load_rank_samples(run: Run, record: Record) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the arrays in the samples of a record, an empty dictionary without a file.

    ``ranks`` are the measured ranks. ``STAMPS`` have a row for each of them and a column for each
    sample of ``steps_per_sample`` steps. Raises ``UserError`` if the file is damaged.
    """
    file = run.path / make_samples_path(record)
    with convert_read_errors(file, "holds no samples that can be read"):
        if not file.exists():
            return {}
        try:
            arrays = _load_arrays(file)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        _check_arrays(arrays, record.world.size)
    return arrays


def _load_arrays(file: Path) -> "dict[str, np.ndarray[Any, Any]]":
    import numpy as np

    names = ("ranks", "steps_per_sample", *STAMPS)
    with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
        return {name: archive[name] for name in names if name in archive}


def _check_arrays(arrays: "dict[str, np.ndarray[Any, Any]]", max_ranks: int) -> None:
    """Raise ``ValueError`` if a type or a shape is not that of samples."""
    for name, array in arrays.items():
        if array.dtype != "int64":
            raise ValueError(f"{name} is an array of {array.dtype}, not of 64-bit integers")
    ranks = arrays.get("ranks")
    if ranks is None or ranks.ndim != 1 or len(ranks) > max_ranks:
        raise ValueError(f"its ranks are not a list of at most {max_ranks}")
    shapes = {arrays[name].shape for name in STAMPS if name in arrays}
    has_rows = all(len(shape) == 2 and shape[0] == len(ranks) and shape[1] for shape in shapes)
    if len(shapes) > 1 or not has_rows:
        stamps = " and ".join(map(str, shapes))
        raise ValueError(f"its stamps are of shape {stamps}, for {len(ranks)} ranks")
    steps = arrays.get("steps_per_sample")
    if steps is not None and (steps.ndim or steps < 1):
        raise ValueError("steps_per_sample is not a count")
