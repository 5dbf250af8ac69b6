"""The messages between the driver and its ranks, and the mailbox that carries them. Without torch.

The driver is the process that starts the ranks and writes their results. A rank sends messages to
the driver. Three values are published under a name instead, where every process can read them: the
job by the driver, the addresses of the torch store by rank 0, and an alarm by the first rank whose
step exceeds its timeout.
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
"""The name of the folder of messages, next to the logs of one start of all ranks."""
JOB = "job"
"""The name under which the driver publishes the cases to measure."""
ADDRESSES = "store-addresses"
"""The name under which rank 0 publishes the addresses of its torch store."""
ALARM = "alarm"
"""The name under which a rank publishes that a measurement takes too long."""
POLL_SECONDS = 0.02
"""The seconds between two checks for a published value."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a rank, with its process and environment.

    The rank then waits for the cases to measure.
    """

    rank: int
    """The global rank."""
    host: str
    """The name of the rank's host."""
    pid: int
    """The process id of the rank on that host."""
    environment: dict[str, Any]
    """The facts about the software and hardware of this rank, by group and then by name.

    An example of a group is ``torch``, with the name ``version``. Facts that are equal on all ranks
    are included.
    """
    process_space: str = ""
    """A text that is equal for ranks that can see each other's processes by process id."""
    place: RankPlace
    """The host, CPUs, NUMA nodes and GPU of the rank."""
    step: str = ""
    """The id of the Slurm job step, such as ``17.0``, empty outside of a job step."""


class Outcome(RecordedOutcome, frozen=True, kw_only=True, tag=True):
    """The result of a case, as the driver infers it from a failure or as rank 0 reports it.

    Rank 0 sends this message after each block of samples, with the result of the block's case from
    all of its blocks so far. A case is a benchmark with values for its parameters. If the inherited
    field ``ranks`` (the state of each rank) is not empty, the ranks have failed and cannot continue.
    """

    more: bool = False
    """True if further samples of the case are to be taken later in the same repetition.

    The outcome is then the result of the samples so far.
    """
    raw: bytes = b""
    """The times of all samples on all measured ranks, as the content of an npz file.

    Empty without samples, and if ``more`` is True.
    """
    timeline: bytes = b""
    """The timeline of one step of all ranks, encoded by ``records.encode_timeline``.

    Empty if no step was profiled.
    """
    wall_seconds: float = 0.0
    """The wall time in seconds of the case so far, with preparation, warm-up and checks.

    It becomes ``Record.seconds``.
    """
    started: str = ""
    """The time (UTC, ISO 8601) at which the measurement of the case began.

    The driver sets it. Ranks leave it empty.
    """


OUT_OF_BUDGET = Outcome(
    status="skipped", reason="out of time", skip_reason=SkipReason.OUT_OF_BUDGET
)
"""The outcome of a case that was not measured, because the time budget of the run was over.

Its status is ``skipped``.
"""


class RankError(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message of a rank that has raised an exception and measures no further."""

    error: str
    """The type and the first line of the exception."""
    stack: str
    """The traceback of the exception as text."""
    seconds: float
    """The time of the exception in seconds since the epoch."""


class HangReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state of a rank after a step exceeded its timeout on any rank.

    A rank sends two reports. The first one has the state of the measuring thread. The second one
    adds the state of the operations on process groups from torch's flight recorder. They are
    separate because reading the flight recorder may block.
    """

    phase: str
    """The phase of the current case on this rank.

    It is ``starting`` (before the first case), ``prepare``, ``check``, ``warm-up``, ``timed`` or
    ``explain`` (profiling a step).
    """
    steps: int
    """The number of samples and untimed steps that the rank has begun in the current case."""
    communicates: bool
    """True if the measuring thread is inside torch.distributed, autograd or a wait for the GPU."""
    stack: str
    """The Python stack of the measuring thread as text."""
    index: int = -1
    """The position of the rank's current block in ``Job.blocks``, -1 before the first block."""
    is_connected: bool = True
    """False if the rank cannot connect to the torch store of rank 0.

    The driver may receive the report of such a rank nevertheless, through a shared file system.
    """
    groups: dict[str, GroupState] = {}
    """The state of the rank's operations on each process group, by the name of the group.

    Empty in the first report.
    """


class StepBegun(msgspec.Struct, frozen=True, tag=True):
    """The message of rank 0 that all ranks have begun a further step. It is not sent for each."""


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a rank, which has measured all of its cases."""

    cpu_seconds: float = 0.0
    """The CPU time in seconds that the rank's process used for the measurement of its cases."""


class RankExit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message about the end of a rank's process, from the process that started it.

    Only the processes that torchrun, mpirun or srun has started as ranks send it.
    """

    code: int
    """The exit code of the rank. A negative code is a signal."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one start of all ranks: the cases, the order of their blocks, and time limits."""

    plan: Plan
    """The plan of the run, with only the cases that these ranks are to measure."""
    blocks: list[int]
    """The blocks of samples in the order of measurement, each as the index of its case in the plan.

    A block is a run of samples of one case, without samples of other cases between them.
    """
    budget_seconds: float
    """The time budget of the repetition in seconds from the start of the job.

    After that, a case that has samples ends with one more sample.
    """
    run_seconds: float
    """The seconds from the start of the job after which no case is begun."""


Message = Hello | Outcome | RankError | HangReport | StepBegun | JobDone | RankExit
"""A message of a rank to the driver."""

# msgspec inspects the types of a message when a decoder is built. Two threads that do this for
# the same types at the same time crash the process, so all decoders are built here.
MESSAGE_DECODER = msgspec.json.Decoder(tuple[int, Message])
"""Decodes JSON to a pair: the global rank of the sender and its message."""
JOB_DECODER = msgspec.json.Decoder(Job)
"""Decodes the job of the ranks from JSON."""


class Mailbox:
    """Carries data between the driver and the ranks of one start of all ranks, as files.

    The driver is the process that starts the ranks. ``post`` sends a message from a rank, which
    only the driver reads, by ``receive``. ``put`` publishes a value under a name, which every
    process can read by ``get``. All hosts must share the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        """Create the subfolder of messages in ``folder`` unless another process has created it."""
        self._values = folder / MAIL
        self._messages = self._values / "messages"
        self._messages.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def put(self, name: str, content: bytes) -> None:
        """Publish a value under a name, where every rank and the driver can read it."""
        write_output(self._values / name, content)

    def get(self, name: str) -> bytes | None:
        """Return the value published under a name, None if no process has published it yet."""
        # NFS remembers for a while that a file is absent, unless the folder is listed.
        is_present = any(file.name == name for file in self._values.iterdir())
        return (self._values / name).read_bytes() if is_present else None

    def post(self, rank: int, message: Message) -> None:
        """Send a message to the driver. ``rank`` is the rank that sends the message."""
        file = self._messages / f"{next(self._numbers):06}-{rank}.json"
        partial = file.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode((rank, message)))
        partial.replace(file)

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages since the last call as pairs: the rank that sent it and the message.

        The messages of a rank are in the order of sending. Only the driver calls this method.
        """
        messages = []
        for file in sorted(self._messages.glob("*.json")):
            messages.append(MESSAGE_DECODER.decode(file.read_bytes()))
            with convert_write_errors(file):
                file.unlink()
        return messages


def wait_for(mailbox: Mailbox, name: str, timeout_seconds: float) -> bytes:
    """Wait until a value is published under a name, and return the value.

    Raises ``TimeoutError`` after ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    while (content := mailbox.get(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not arrive within {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return content
