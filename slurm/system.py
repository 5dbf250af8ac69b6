"""Slurm's own programs, called: each with a time limit, its words made one sentence, its output made values.

Only formats that are documented for scripts are read: ``--parsable``, ``-h -o`` and ``scontrol show ... -o``.
"""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from parbench.bench.text import UserError

_PREFIX = re.compile(r"^\w+: (?:(?:error|fatal): )?")
_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")


class SlurmError(UserError):
    """One sentence: which of Slurm's programs could not be had, did not answer, or refused, and its own words."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition; ``limit_seconds`` is infinite where it sets none."""

    name: str
    nodes: int
    limit_seconds: float
    is_default: bool = False
    is_up: bool = True


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One line of squeue: ``id`` is what sbatch told, of an array the whole's; ``own_id`` is that of the task."""

    id: str
    own_id: str
    state: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Slurm as this process reaches it; every method raises ``SlurmError`` if it does not answer or refuses."""

    timeout_seconds: float = 30.0

    def check_program(self, name: str) -> None:
        if shutil.which(name) is None:
            raise SlurmError(
                f"{name} is not in the PATH: submit where Slurm's programs are installed"
            )

    def sbatch(self, script: Path) -> str:
        """Submit a batch script and return the job's id, that of the whole array for an array."""
        text = self.call("sbatch", "--parsable", str(script))
        found = text.split()[-1].partition(";")[0] if text.split() else ""  # 17, or 17;cluster
        if not found.isdigit():
            raise SlurmError(f"sbatch told no job id but {text.strip()!r}")
        return found

    def scancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs by id; those that have ended already are passed over."""
        if ids:
            self.call("scancel", *ids)

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue, to run its script again from the start."""
        self.call("scontrol", "requeue", job_id)

    def queue(self) -> tuple[QueuedJob, ...]:
        """Return this user's jobs that wait or run, one for each task of an array."""
        rows = self._table("squeue", "%F|%A|%T|%r", "-r", "--me")
        return tuple(
            QueuedJob(id=base, own_id=own, state=state, reason=why)
            for base, own, state, why in rows
        )

    def show_job(self, job_id: str) -> tuple[Mapping[str, str], ...]:
        """Return what the controller remembers of a job, one mapping for each task; nothing if it knows none."""
        try:
            text = self.call("scontrol", "show", "job", "-o", job_id)
        except SlurmError as error:
            if "Invalid job id" in str(error) or "Job/step already completing or completed" in str(
                error
            ):
                return ()
            raise
        found = [_PAIR.split(line)[1:] for line in text.splitlines() if line.startswith("JobId=")]
        return tuple(
            dict(zip(words[::2], map(str.strip, words[1::2]), strict=True)) for words in found
        )

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions in Slurm's order, each with the nodes of all its lines."""
        found: dict[str, Partition] = {}
        for name, nodes, limit, available in self._table("sinfo", "%P|%D|%l|%a"):
            plain = name.removesuffix("*")
            found[plain] = Partition(
                name=plain,
                nodes=int(nodes) + (found[plain].nodes if plain in found else 0),
                limit_seconds=parse_limit(limit),
                is_default=name.endswith("*"),
                is_up=available == "up",
            )
        return tuple(found.values())

    def node_states(self, nodes: Sequence[str] = ()) -> dict[str, str]:
        """Return the states (``idle``, ``allocated``, ``down*``...) of the named nodes, of all without names."""
        only = ("-n", ",".join(nodes)) if nodes else ()
        return dict(self._table("sinfo", "%N|%T", "-N", *only))

    def host_names(self, node_list: str) -> tuple[str, ...]:
        """Return the names that a list such as ``n[1-3,7]`` stands for."""
        return (
            tuple(self.call("scontrol", "show", "hostnames", node_list).split())
            if node_list
            else ()
        )

    def _table(self, program: str, form: str, *words: str) -> list[list[str]]:
        rows = [
            line.split("|") for line in self.call(program, "-h", *words, "-o", form).splitlines()
        ]
        for row in rows:
            numbers = [
                cell for cell, field in zip(row, form.split("|"), strict=False) if field == "%D"
            ]
            if len(row) != len(form.split("|")) or not all(number.isdigit() for number in numbers):
                raise SlurmError(
                    f"{program} told {'|'.join(row)!r}, which is not of the form {form}"
                )
        return rows

    def call(self, program: str, *words: str) -> str:
        """Run one of Slurm's programs and return what it printed."""
        try:
            done = subprocess.run(
                [program, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                encoding="utf-8",
                errors="replace",
                timeout=self.timeout_seconds,
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            )
        except FileNotFoundError as error:
            raise SlurmError(
                f"{program} is not in the PATH: go where Slurm's programs are installed"
            ) from error
        except OSError as error:
            raise SlurmError(f"{program} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(
                f"{program} did not answer within {self.timeout_seconds:g} s"
            ) from error
        if done.returncode != 0:
            complaints = dict.fromkeys(
                _PREFIX.sub("", line.strip()) for line in done.stderr.splitlines()
            )
            told = (
                "; ".join(line for line in complaints if line) or f"it ended with {done.returncode}"
            )
            raise SlurmError(f"{program} refused: {told}")
        return done.stdout


SLURM = Slurm()


def parse_limit(text: str) -> float:
    """Return the seconds of Slurm's ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds`` or ``days-hours...``.

    What sets no limit (``infinite``, ``UNLIMITED``, ``n/a``) is infinite.
    """
    days, _, rest = text.strip().rpartition("-")
    parts = rest.split(":") if days or rest.count(":") > 1 else ["0", *rest.split(":")]  # no hours
    if not all(part.isdecimal() for part in (days or "0", *parts)):
        return math.inf
    hours, minutes, seconds = (*map(int, parts), 0, 0)[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def format_limit(seconds: float) -> str:
    """Return seconds as Slurm's ``--time`` takes them, rounded up to whole minutes: ``0:42:00``, ``26:00:00``."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours}:{minutes:02}:00"


MARGIN_SECONDS = 8.0
"""What must be left when a point is stopped for the time's sake: its ranks end, its records are on disk."""


def end_time(job: Mapping[str, str], environ: Mapping[str, str]) -> float:
    """Return when a job ends, in seconds of the epoch; infinity where nothing limits it.

    ``job`` holds the facts of ``scontrol show job -o``, empty where it gave none; SLURM_JOB_END_TIME then tells.
    """
    if job.get("TimeLimit") == "UNLIMITED":
        return math.inf
    end = job.get("EndTime", "Unknown")
    if end not in ("Unknown", "N/A", "None"):
        return datetime.fromisoformat(
            end
        ).timestamp()  # scontrol prints the local time of where it runs
    told = environ.get("SLURM_JOB_END_TIME", "")
    return float(told) if told.isdecimal() and int(told) > 0 else math.inf


def too_long(needed_seconds: float, left_seconds: float) -> str:
    """Return why a point does not fit into what is left, ``needs about 95 s, 60 s are left``; nothing if it does."""
    if needed_seconds <= left_seconds:
        return ""
    return (
        f"needs about {math.ceil(needed_seconds)} s, {max(math.floor(left_seconds), 0)} s are left"
    )
