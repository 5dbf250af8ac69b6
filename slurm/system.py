"""Calls of Slurm's programs, each with a time limit, and the values in their output.

Only documented formats for scripts are read: ``--parsable``, ``-h -o`` and ``scontrol show -o``.
"""

import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from parbench.bench.text import UserError, get_last_line

_PREFIX = re.compile(r"^\w+: (?:(?:error|fatal): )?")
"""The start of a message of a Slurm program, such as ``sbatch: error:``."""
_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
"""The key of a field in the output of ``scontrol show``."""
_UNKNOWN_JOB = ("Invalid job id", "Job/step already completing or completed")
"""Parts of the messages that scontrol prints for a job that Slurm no longer has."""
MARGIN_SECONDS = 8.0
"""The seconds before the end of a job that a run needs to end its ranks and write its records."""


class SlurmError(UserError):
    """The error that a program of Slurm is missing, did not answer in time, or failed.

    The message contains the text that a failed program printed.
    """


class SlurmTimeoutError(SlurmError):
    """The error that a program of Slurm did not answer in time, and was killed."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in Slurm's queue that waits or runs, or one task of an array of jobs."""

    id: str
    """The id that sbatch printed. All tasks of an array have the id of the array."""
    own_id: str
    """The id of this job or task, which differs between the tasks of an array."""
    state: str
    """The state of the job in capitals as squeue prints it, such as ``PENDING`` or ``RUNNING``."""
    reason: str
    """The reason why the job waits, as squeue prints it, or the text ``None`` for a running job."""
    task: int | None = None
    """The index of the task in its array, None for a job that is not in an array."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The programs of Slurm as methods. Each method raises ``SlurmError`` if a program fails."""

    timeout_seconds: float = 30.0
    """The seconds after which a program that has not ended is killed and counts as failed."""

    def sbatch(self, script: Path) -> str:
        """Submit a batch script and return the id of the job, or of the whole array."""
        output = self._call("sbatch", "--parsable", str(script))
        job_id = get_last_line(output).partition(";")[0]  # 17, or 17;cluster
        if not job_id.isdigit():
            raise SlurmError(f"sbatch printed {output.strip()!r}, which is not the id of a job")
        return job_id

    def scancel(self, ids: Sequence[str]) -> None:
        """Cancel the jobs with these ids. Jobs that have ended raise no error."""
        if ids:
            self._call("scancel", *ids)

    def requeue(self, job_id: str) -> None:
        """Put a running job back into the queue. Slurm will run the job's batch script again."""
        self._call("scontrol", "requeue", job_id)

    def queue(self) -> tuple[QueuedJob, ...]:
        """Return the jobs of this user that wait or run, one entry for each task of an array."""
        jobs = []
        for job_id, own_id, state, reason, task in self._read_table(
            "squeue", "%F|%A|%T|%r|%K", "-r", "--me"
        ):
            index = int(task) if task.isdigit() else None
            jobs.append(QueuedJob(id=job_id, own_id=own_id, state=state, reason=reason, task=index))
        return tuple(jobs)

    def show_job(self, job_id: str) -> tuple[Mapping[str, str], ...]:
        """Return the fields that ``scontrol show job`` prints, by name such as ``JobState``.

        The result has one mapping for a job, one for each task of an array, and none for a job that
        Slurm no longer has.
        """
        try:
            output = self._call("scontrol", "show", "job", "-o", job_id)
        except SlurmError as error:
            if any(text in str(error) for text in _UNKNOWN_JOB):
                return ()
            raise
        jobs = []
        for line in output.splitlines():
            if line.startswith("JobId="):
                _, *parts = _KEY.split(line)
                values = [part.strip() for part in parts[1::2]]
                jobs.append(dict(zip(parts[::2], values, strict=True)))
        return tuple(jobs)

    def get_node_states(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the states of nodes as sinfo prints them, such as ``idle``, by name of the node.

        A mark such as ``*`` in ``idle*`` (the node does not respond) is part of the state.
        """
        return dict(self._read_table("sinfo", "%N|%T", "-N", "-n", ",".join(nodes)))

    def expand_node_list(self, node_list: str) -> tuple[str, ...]:
        """Return the names of the nodes in a text such as ``n[1-3,7]``: n1, n2, n3 and n7.

        An empty text has no nodes.
        """
        if not node_list:
            return ()
        return tuple(self._call("scontrol", "show", "hostnames", node_list).split())

    def _read_table(self, program: str, columns: str, *arguments: str) -> list[list[str]]:
        """Return the rows that a program such as squeue prints, each as a list of texts.

        ``columns`` is the output format of the program (the value of its option ``-o``), with ``|``
        between the columns. ``arguments`` are further arguments of the program.
        """
        num_columns = len(columns.split("|"))
        rows = []
        for line in self._call(program, "-h", *arguments, "-o", columns).splitlines():
            row = line.split("|")
            if len(row) != num_columns:
                raise SlurmError(f"{program} printed {line!r}, which is not of the form {columns}")
            rows.append(row)
        return rows

    def _call(self, program: str, *arguments: str) -> str:
        """Run a program of Slurm and return the text that it printed.

        Raises ``SlurmError`` if it cannot be started, takes too long or exits with an error.
        """
        try:
            completed = subprocess.run(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                encoding="utf-8",
                errors="replace",
                timeout=self.timeout_seconds,
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
                start_new_session=True,  # The caller alone receives the Ctrl-C of a terminal.
            )
        except OSError as error:
            hint = "use a host where Slurm is installed"
            raise SlurmError(f"{program} cannot be started ({error.strerror}): {hint}") from error
        except subprocess.TimeoutExpired as error:
            limit = f"{self.timeout_seconds:g} s"
            raise SlurmTimeoutError(f"{program} did not answer within {limit}") from error
        if completed.returncode != 0:
            messages = [_PREFIX.sub("", line.strip()) for line in completed.stderr.splitlines()]
            text = "; ".join(message for message in dict.fromkeys(messages) if message)
            raise SlurmError(f"{program} refused: {text or f'exit code {completed.returncode}'}")
        return completed.stdout


SLURM = Slurm()


def format_limit(seconds: float) -> str:
    """Return a time limit as hours, minutes and seconds for Slurm's ``--time``: ``26:00:00``.

    ``seconds`` are rounded up to whole minutes.
    """
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours}:{minutes:02}:00"


def get_end_time(job: Mapping[str, str]) -> float:
    """Return the time at which Slurm ends a job, in seconds since the epoch.

    It is infinity for a job without a time limit. ``job`` has the fields of the job, an entry of
    the result of ``Slurm.show_job``.
    """
    end = job.get("EndTime", "Unknown")
    if end in ("Unknown", "N/A", "None"):
        return math.inf
    return datetime.fromisoformat(end).timestamp()  # local time
