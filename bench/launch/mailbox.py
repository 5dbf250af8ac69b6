"""Messages between the driver and its ranks: files of a folder, or values of a torch store.

A rank posts its own messages. The driver puts the job, rank 0 the addresses of its store, and a
rank whose block exceeds its deadline an alarm. Nobody polls while a case is measured.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from parbench.bench.files import convert_write_errors, replace_file
from parbench.bench.launch.messages import MESSAGE_DECODER, Message

MAIL = "mail"
"""The folder of messages in the folder of an attempt."""
JOB = "job"
ADDRESSES = "store-addresses"
ALARM = "alarm"
POLL_SECONDS = 0.02


class Mailbox(Protocol):
    """Carries messages between the driver and the ranks of one attempt."""

    def put(self, name: str, content: bytes, /) -> None:
        """Publish a value under a name for every process."""

    def get(self, name: str) -> bytes | None:
        """Return a published value, None if there is none yet."""

    def post(self, rank: int, message: Message) -> None:
        """Send a message of a rank to the driver."""

    def receive(self) -> Sequence[tuple[int, Message]]:
        """Return the messages that have arrived since the last call, with their ranks."""


class FolderMailbox:
    """A mailbox in a folder that the hosts of all ranks share; every message is a file."""

    def __init__(self, folder: Path) -> None:
        self._values = folder / MAIL
        self._messages = self._values / "messages"
        self._messages.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def put(self, name: str, content: bytes) -> None:
        replace_file(self._values / name, content)

    def get(self, name: str) -> bytes | None:
        # NFS remembers for a while that a file is absent, unless the folder is listed.
        is_present = any(file.name == name for file in self._values.iterdir())
        return (self._values / name).read_bytes() if is_present else None

    def post(self, rank: int, message: Message) -> None:
        file = self._messages / f"{next(self._numbers):06}-{rank}.json"
        partial = file.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode((rank, message)))
        partial.replace(file)

    def receive(self) -> Sequence[tuple[int, Message]]:
        messages = []
        for file in sorted(self._messages.glob("*.json")):
            messages.append(MESSAGE_DECODER.decode(file.read_bytes()))
            with convert_write_errors(file):
                file.unlink()
        return messages


def wait_for(mailbox: Mailbox, name: str, timeout_seconds: float) -> bytes:
    """Return a value once it is published; ``TimeoutError`` if nobody publishes it."""
    deadline = time.monotonic() + timeout_seconds
    while (content := mailbox.get(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not arrive within {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return content
