"""Who measures a point: claims that exactly one process holds, however many jobs work on a sweep.

A point's claims are numbered, ``claims/<point>.0``, ``.1``, ...; the highest counts and none is ever removed. Whoever
wants a point that is given back, or whose owner is gone, makes the next number: that succeeds once, so no two processes
can take over the same claim. A claim is written whole and then linked to its name, which is atomic on NFS too.
"""

import errno
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from parbench.bench.files import decode_json, read_file
from parbench.bench.text import UserError, reading, writing
from parbench.slurm.system import ENDED, Slurm, SlurmError

FOLDER = "claims"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that works on a sweep: its job, how often that was requeued, and where it runs."""

    job: str
    restart: int
    host: str
    pid: int
    token: str

    @property
    def writer(self) -> str:
        return f"{self.job}-r{self.restart}-{self.host}-{self.pid}"


def this_owner(environ: Mapping[str, str]) -> Owner:
    return Owner(
        job=environ.get("SLURM_JOB_ID", "none"),
        restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
        host=socket.gethostname(),
        pid=os.getpid(),
        token=secrets.token_hex(8),
    )


def is_gone(owner: Owner, me: Owner, slurm: Slurm) -> bool:
    """Say whether an owner is known to be gone; where nobody can tell, it counts as alive.

    A job that Slurm has forgotten, that has ended or that was requeued since is gone.
    """
    if owner.job == me.job and owner.restart == me.restart:
        return owner.host == me.host and owner.pid != me.pid and not psutil.pid_exists(owner.pid)
    if owner.job == me.job:
        return owner.restart < me.restart
    if not owner.job.isdecimal():
        return False
    try:
        facts = slurm.show_job(owner.job)
    except SlurmError:
        return False
    return not any(
        job.get("JobState") not in ENDED and int(job.get("Restarts", "0")) <= owner.restart
        for job in facts
        if job.get("JobId") == owner.job
    )


class Claims:
    """The claims of one sweep, as one owner takes and gives them back."""

    def __init__(self, sweep: Path, owner: Owner, gone: Callable[[Owner], bool]) -> None:
        self._folder, self._owner, self._gone = sweep / FOLDER, owner, gone
        self._held: dict[str, Path] = {}
        self._folder.mkdir(exist_ok=True)

    def take(self, point: str) -> Owner | None:
        """Claim a point; return None if it is now ours, else who holds it."""
        numbers = (path.name.removeprefix(f"{point}.") for path in self._folder.glob(f"{point}.*"))
        highest = max((int(number) for number in numbers if number.isdecimal()), default=-1)
        if highest >= 0:
            claim = self._folder / f"{point}.{highest}"
            holder = _read(claim)
            if not _given_back(claim).exists() and not self._gone(holder):
                return holder
        claim = self._folder / f"{point}.{highest + 1}"
        draft = self._folder / f".{self._owner.token}"
        try:
            with writing(claim, "cannot be made"):
                draft.write_bytes(msgspec.json.encode(self._owner))
                with suppress(FileExistsError):  # another's, or ours: NFS may say so of a link that it has just made
                    _link(draft, claim)
        finally:
            draft.unlink(missing_ok=True)
        holder = _read(claim)
        if holder != self._owner:
            return holder
        self._held[point] = claim
        return None

    def give_back(self, point: str) -> None:
        """Let others have the point at once, without asking Slurm whether this owner is gone."""
        _given_back(self._held.pop(point)).touch()


def _link(draft: Path, claim: Path) -> None:
    try:
        claim.hardlink_to(draft)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise UserError(f"{claim.parent} is on a file system without hard links, which claims need") from error
        raise


def _given_back(claim: Path) -> Path:
    return claim.with_name(f"{claim.name}.free")


def _read(claim: Path) -> Owner:
    with reading(claim):
        return decode_json(read_file(claim), Owner)
