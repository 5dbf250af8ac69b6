"""How the driver and its ranks exchange messages: as files of a folder, or as keys of a torch store.

A rank posts its own messages. The driver puts the job, rank 0 the address of its store, and a rank whose visit exceeds
its deadline an alarm. Nobody polls while a case is measured.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from parbench.bench.launch.messages import REPORT_DECODER, FromRank
from parbench.bench.text import replace_file

JOB = "job.json"
ADDRESSES = "store-addresses"
ALARM = "alarm"
POLL_SECONDS = 0.02


class Mailbox(Protocol):
    """Carries messages between the driver and the ranks of one attempt."""

    def put(self, name: str, content: bytes, /) -> None:
        """Publish a value under a name for every process."""

    def get(self, name: str) -> bytes | None:
        """Return a published value, None if there is none yet."""

    def post(self, rank: int, message: FromRank) -> None:
        """Send a message of a rank to the driver."""

    def receive(self) -> Sequence[tuple[int, FromRank]]:
        """Return the messages that have arrived since the last call, with their ranks."""


class FolderMailbox:
    """A mailbox in a folder that the hosts of all ranks share; every message is a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports = folder / "reports"
        self._reports.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        self._received: set[str] = set()

    def put(self, name: str, content: bytes) -> None:
        replace_file(self._folder / name, content)

    def get(self, name: str) -> bytes | None:
        # NFS remembers for a while that a file is absent, unless the folder is listed.
        is_present = any(file.name == name for file in self._folder.iterdir())
        return (self._folder / name).read_bytes() if is_present else None

    def post(self, rank: int, message: FromRank) -> None:
        name = f"{rank}-{next(self._numbers)}.json"
        replace_file(self._reports / name, msgspec.json.encode((rank, message)))

    def receive(self) -> Sequence[tuple[int, FromRank]]:
        names = {file.name for file in self._reports.iterdir() if file.suffix == ".json"}
        new_names = sorted(names - self._received)
        self._received |= names
        return [REPORT_DECODER.decode((self._reports / name).read_bytes()) for name in new_names]


def wait_for(mailbox: Mailbox, name: str, timeout_seconds: float) -> bytes:
    """Return a value once it is published; ``TimeoutError`` if nobody publishes it."""
    deadline = time.monotonic() + timeout_seconds
    while (content := mailbox.get(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not arrive within {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return content
