"""The messages between the driver and its ranks, and the mailbox that carries them. Without torch.

A rank posts its own messages. The driver puts the job, rank 0 the addresses of its store, and a
rank whose block exceeds its deadline an alarm. Nobody polls while a case is measured.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.files import convert_write_errors, write_output
from parbench.bench.launch.flight_recorder import GroupState
from parbench.bench.machine.environment import RankPlace
from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import RecordedOutcome, SkipReason

MAIL = "mail"
"""The folder of messages in the folder of an attempt."""
JOB = "job"
ADDRESSES = "store-addresses"
ALARM = "alarm"
POLL_SECONDS = 0.02


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a rank, which then waits for its job."""

    rank: int
    host: str
    pid: int
    environment: dict[str, Any]
    """The environment of this rank, including what all ranks share."""
    process_space: str = ""
    """A text that is equal for ranks that can see each other's processes by process id."""
    place: RankPlace
    step: str = ""
    """The id of Slurm's job step, such as ``17.0``, empty outside of a job step."""


class Outcome(RecordedOutcome, frozen=True, kw_only=True):
    """The result of a case, as rank 0 reports it or as the driver concludes it.

    The field ``ranks`` is not empty if ranks failed and cannot continue.
    """

    more: bool = False
    """True if more blocks follow, so that this is the result so far."""
    raw: bytes = b""
    """The samples of every rank as the content of an npz file, empty without samples."""
    timeline: bytes = b""
    """A step of all ranks, encoded by ``records.encode_timeline``. Empty without a timeline."""
    wall_seconds: float = 0.0
    """The time of all blocks of the case, with preparation, warm-up and checks."""
    started: str = ""
    """The time (UTC) at which the first block began, which the driver notes."""


OUT_OF_BUDGET = Outcome(
    status="skipped", reason="out of time", skip_reason=SkipReason.OUT_OF_BUDGET
)


class BlockResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of a case so far, which rank 0 sends after the block at ``index``."""

    index: int
    outcome: Outcome


class RankError(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The exception that ended the work of a rank."""

    error: str
    """The first line of the exception."""
    stack: str
    """The Python stack of the exception."""
    seconds: float
    """The time of the exception since the epoch."""


class HangReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state of a rank whose block exceeds its deadline.

    A rank reports twice: first the state of its Python thread, then also torch's records of
    ``groups``. Reading these records may block.
    """

    phase: str
    steps: int
    """The steps that the rank has begun in this case."""
    communicates: bool
    """True if the measuring thread is inside torch.distributed."""
    stack: str
    index: int = -1
    """The index of the rank's block in the job, -1 before the first block."""
    is_connected: bool = True
    """False if the rank cannot connect to rank 0. A file system may still carry its report."""
    groups: dict[str, GroupState] | None = None
    """The work of the rank by the name of the process group, None if torch has no records."""
    more: bool = False
    """True if the second report follows."""


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a rank that has completed its job."""

    cpu_seconds: float = 0.0
    """The CPU time of the rank's process during the job."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the samples of a case. Blocks of other cases come before and after it."""

    case: int
    """The index of the case in the plan."""
    weight: float = 0.0
    """The relative share of free time. Blocks of weight 0 use the time left over."""
    cost_seconds: float = 0.0
    """The least time that the block takes, 0 if it is unknown."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The cases to measure, their blocks in order, and the time for them."""

    plan: Plan
    """The plan of the run with the remaining cases only."""
    blocks: list[Block]
    budget_seconds: float
    """The time after the start of the job from which on no case has further blocks."""
    run_seconds: float
    """The time after the start of the job from which on no case is begun."""


Message = Hello | BlockResult | RankError | HangReport | JobDone
"""A message of a rank to the driver."""

# msgspec inspects the types of a message when a decoder is built. Two threads that do this for
# the same types at the same time crash the process, so all decoders are built here.
MESSAGE_DECODER = msgspec.json.Decoder(tuple[int, Message])
JOB_DECODER = msgspec.json.Decoder(Job)


class Mailbox:
    """Carries the messages between the driver and the ranks of one start.

    The hosts of all ranks share its folder, in which every message is a file.
    """

    def __init__(self, folder: Path) -> None:
        self._values = folder / MAIL
        self._messages = self._values / "messages"
        self._messages.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def put(self, name: str, content: bytes) -> None:
        """Publish a value under a name. Every process can read it."""
        write_output(self._values / name, content)

    def get(self, name: str) -> bytes | None:
        """Return a published value, None if there is none yet."""
        # NFS remembers for a while that a file is absent, unless the folder is listed.
        is_present = any(file.name == name for file in self._values.iterdir())
        return (self._values / name).read_bytes() if is_present else None

    def post(self, rank: int, message: Message) -> None:
        """Send a message of a rank to the driver."""
        file = self._messages / f"{next(self._numbers):06}-{rank}.json"
        partial = file.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode((rank, message)))
        partial.replace(file)

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages since the last call, each with the rank that sent it."""
        messages = []
        for file in sorted(self._messages.glob("*.json")):
            messages.append(MESSAGE_DECODER.decode(file.read_bytes()))
            with convert_write_errors(file):
                file.unlink()
        return messages


def wait_for(mailbox: Mailbox, name: str, timeout_seconds: float) -> bytes:
    """Wait for a published value and return it. Raises ``TimeoutError`` if nobody publishes it."""
    deadline = time.monotonic() + timeout_seconds
    while (content := mailbox.get(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not arrive within {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return content
