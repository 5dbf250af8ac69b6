"""The file in which rank 0 reports the progress of a repetition, line by line, and which the driver follows."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from parbench.bench.launch.messages import PROGRESS_DECODER, Finished, Progress

NAME = "outcomes.jsonl"


class OutcomeWriter(AbstractContextManager["OutcomeWriter"]):
    """Appends to the file; complete outcomes are on disk before the next visit begins."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / NAME).open("ab", buffering=0)

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, line: Progress) -> None:
        content = msgspec.json.encode(line) + b"\n"
        if self._file.write(content) != len(content):
            raise OSError(f"{self._file.name} takes no more lines")
        if isinstance(line, Finished) and not line.outcome.more:
            os.fsync(self._file.fileno())


class OutcomeReader:
    """Reads the lines that were appended since the last call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._offset = 0

    def read(self) -> Iterator[Progress]:
        """Yield new lines; a line that is not complete yet is left for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            yield PROGRESS_DECODER.decode(line)
