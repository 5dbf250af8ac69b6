"""Calls of Slurm's programs, each with a time limit, and the values in their output.

Only documented formats for scripts are read: ``--parsable``, ``-h -o`` and ``scontrol show -o``.
"""

import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from parbench.bench.text import UserError, get_last_line

_PREFIX = re.compile(r"^\w+: (?:(?:error|fatal): )?")
_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_UNKNOWN_JOB = ("Invalid job id", "Job/step already completing or completed")
MARGIN_SECONDS = 8.0
"""The seconds that a point needs to end its ranks and to write its records."""


class SlurmError(UserError):
    """A program of Slurm is missing, did not answer, or refused.

    The message contains the text that a refusing program printed.
    """


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in Slurm's queue that waits or runs, or one task of an array."""

    id: str
    """The id that sbatch printed. All tasks of an array have the same one."""
    own_id: str
    """The id of this job or task, which differs between the tasks of an array."""
    state: str
    """The state in capitals as squeue prints it, such as ``PENDING``."""
    reason: str
    """The reason why the job waits, as squeue prints it, or ``None``."""
    task: int | None = None
    """The index of the task in its array, None for a job that is not in an array."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Calls the programs of Slurm. Every method raises ``SlurmError`` if a call fails."""

    timeout_seconds: float = 30.0

    def sbatch(self, script: Path) -> str:
        """Submit a batch script and return the id of the job, or of the whole array."""
        output = self._call("sbatch", "--parsable", str(script))
        job_id = get_last_line(output).partition(";")[0]  # 17, or 17;cluster
        if not job_id.isdigit():
            raise SlurmError(f"sbatch printed {output.strip()!r}, which is not the id of a job")
        return job_id

    def check_script(self, script: Path) -> None:
        """Let sbatch check a batch script without submitting it."""
        self._call("sbatch", "--test-only", str(script))

    def scancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs. Slurm accepts jobs that have ended."""
        if ids:
            self._call("scancel", *ids)

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue. Its script will start again."""
        self._call("scontrol", "requeue", job_id)

    def queue(self) -> tuple[QueuedJob, ...]:
        """Return the jobs of this user that wait or run, one for each task of an array."""
        jobs = []
        for job_id, own_id, state, reason, task in self._read_table(
            "squeue", "%F|%A|%T|%r|%K", "-r", "--me"
        ):
            index = int(task) if task.isdigit() else None
            jobs.append(QueuedJob(id=job_id, own_id=own_id, state=state, reason=reason, task=index))
        return tuple(jobs)

    def show_job(self, job_id: str) -> tuple[Mapping[str, str], ...]:
        """Return the scontrol fields of a job, one mapping for each task.

        Empty for a job that Slurm no longer knows.
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

    def get_node_states(self, nodes: Sequence[str] = ()) -> dict[str, str]:
        """Return the state of each node by its name, such as ``idle``.

        If ``nodes`` is empty, all nodes of the cluster are returned.
        """
        selection = ("-n", ",".join(nodes)) if nodes else ()
        return dict(self._read_table("sinfo", "%N|%T", "-N", *selection))

    def expand_node_list(self, node_list: str) -> tuple[str, ...]:
        """Return the names in a list such as ``n[1-3,7]``."""
        if not node_list:
            return ()
        return tuple(self._call("scontrol", "show", "hostnames", node_list).split())

    def map_hosts(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return Slurm's name of the node of each host, keyed by the name that ``uname -n`` prints.

        A job step on these nodes finds both names. Hosts with equal names are left out, because
        they cannot be distinguished.
        """
        if not nodes:
            return {}
        step = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        step += [f"--nodelist={','.join(nodes)}", "--overlap", "--mpi=none", "--input=none"]
        script = 'echo "$(uname -n)|$SLURMD_NODENAME"'
        output = self._call("srun", *step, "sh", "-c", script)
        pairs = [line.split("|") for line in output.splitlines() if line.count("|") == 1]
        counts = Counter(host for host, _ in pairs)
        return {host: node for host, node in pairs if counts[host] == 1}

    def _read_table(self, program: str, columns: str, *arguments: str) -> list[list[str]]:
        """Return the rows that a program such as squeue prints.

        ``columns`` is its output format.
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
        """Run a program and return its output."""
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
            )
        except OSError as error:
            hint = "use a host where Slurm is installed"
            raise SlurmError(f"{program} cannot be started ({error.strerror}): {hint}") from error
        except subprocess.TimeoutExpired as error:
            limit = f"{self.timeout_seconds:g} s"
            raise SlurmError(f"{program} did not answer within {limit}") from error
        if completed.returncode != 0:
            messages = [_PREFIX.sub("", line.strip()) for line in completed.stderr.splitlines()]
            text = "; ".join(message for message in dict.fromkeys(messages) if message)
            raise SlurmError(f"{program} refused: {text or f'exit code {completed.returncode}'}")
        return completed.stdout


SLURM = Slurm()


def format_limit(seconds: float) -> str:
    """Return a value of ``--time`` such as ``26:00:00``, rounded up to whole minutes."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours}:{minutes:02}:00"


def get_end_time(job: Mapping[str, str]) -> float:
    """Return the end of a job in seconds since the epoch, infinity without a limit.

    ``job`` holds the fields of ``scontrol show job``.
    """
    end = job.get("EndTime", "Unknown")
    if end in ("Unknown", "N/A", "None"):
        return math.inf
    return datetime.fromisoformat(end).timestamp()  # local time
