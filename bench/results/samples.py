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
    """Return the path of a record's samples relative to the folder of the run."""
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
            return _load_arrays(file)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error)) from error


def _load_arrays(file: Path) -> "dict[str, np.ndarray[Any, Any]]":
    import numpy as np

    names = ("ranks", "steps_per_sample", *STAMPS)
    with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
        return {name: archive[name] for name in names if name in archive}
