"""One rank: tells the driver who it is, takes its job, and does one case after another."""

import gc
import importlib.metadata
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Store

from bench.launch.control_channel import (
    ADDRESS_VARIABLE,
    KEY_VARIABLE,
    LEFT_OUT,
    Done,
    Finished,
    Hello,
    Job,
    Outcome,
    Raised,
    RankClient,
    Started,
)
from bench.launch.processes import die_with_parent
from bench.machine.environment import capture
from bench.machine.topology import rank_place
from bench.rank.runner import run_case
from bench.rank.timing import Progress
from bench.world.subgroups import Subgroups
from bench.world.world import World, open_world

_MIN_CASE_SECONDS = 0.02
# the rest is for preparing, checking and what cannot be cut short
_TIMEOUT_SHARE = 0.5


def main() -> None:
    """Do the driver's job as the rank that RANK names, in a process of its own."""
    die_with_parent(signal.SIGKILL)
    work(os.environ[ADDRESS_VARIABLE], os.environ[KEY_VARIABLE])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way out takes a noticeable subgroup of a launch


class Meeting(Protocol):
    """How ranks find each other where no launcher has told them."""

    def offer(self, own_address: str) -> str:
        """Return where the ranks may meet, if this one has bound a store for them."""

    def join(self, where: str) -> Store:
        """Return the store that a rank has bound there."""


def work(
    address: str, key: str, store: Store | None = None, *, with_driver: bool = False, meeting: Meeting | None = None
) -> None:
    """Connect to the driver at ``address`` and do its job.

    This process ends when the driver goes before the job is done, unless the driver lives in it (``with_driver``).
    ``store`` is the rendezvous already made, if there is one; ``meeting`` makes one with the driver's help.
    """
    client = RankClient(address, key)
    done = threading.Event()

    def end() -> None:
        if not (with_driver or done.is_set()):
            os._exit(1)

    client.say(_hello(meeting.offer(client.own_address) if meeting else ""))
    job = client.hear()
    if not isinstance(job, Job):
        end()
        return
    progress = Progress()
    client.listen(answer=progress.where, on_gone=end)
    try:
        if job.plan.path is not None:
            sys.path.append(job.plan.path)
        timeout = 2 * job.plan.timeout_seconds + 60
        if meeting is not None:
            _sit_down(job.hosts)
            store = meeting.join(job.meeting)
        with open_world(job.plan.backend, job.plan.device, job.plan.measure.seed, timeout, store) as world:
            _cases(client, job, world, progress)
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver is told
        _stand_still(client, None, error)
    done.set()
    client.say(Done())


def _sit_down(hosts: Sequence[str]) -> None:
    """Tell torch this rank's place on its host, from the hosts that all ranks named."""
    here = [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]
    os.environ["LOCAL_RANK"] = str(here.index(int(os.environ["RANK"])))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(here))


def _cases(client: RankClient, job: Job, world: World, progress: Progress) -> None:
    subgroups = Subgroups(world)
    for index, share in enumerate(_shares(job)):
        try:
            _one_case(client, job, index, share, subgroups, progress)
        except Exception as error:  # noqa: BLE001 - whatever a case raises is told to the driver
            # before this rank leaves the world: ranks that miss it raise too, and the first to tell is named
            _stand_still(client, index, error)


def _stand_still(client: RankClient, index: int | None, error: Exception) -> None:
    """Tell the driver what was raised, and wait for the end: the driver ends the gang."""
    client.say(Raised(index=index, error=_sentence(error), stack=traceback.format_exc()))
    threading.Event().wait()


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one case may take, and whether there is any time left for it, as this rank sees it."""

    seconds: float
    in_time: bool


def _shares(job: Job) -> Iterator[_Share]:
    """Yield each case's share of the time that is left when its turn comes."""
    began = time.monotonic()
    for index in range(len(job.plan.cases)):
        spent = time.monotonic() - began
        weights = job.weights[index:]
        share = (job.budget_seconds - spent) * weights[0] / sum(weights)
        most = _TIMEOUT_SHARE * job.plan.timeout_seconds
        yield _Share(seconds=min(max(share, _MIN_CASE_SECONDS), most), in_time=spent < job.run_seconds)


def _one_case(
    client: RankClient, job: Job, index: int, share: _Share, subgroups: Subgroups, progress: Progress
) -> None:
    client.say(Started(index=index))
    subgroups.retime()
    world = subgroups.world
    if world.decide([float(share.in_time)])[0]:
        outcome = run_case(
            job.plan.cases[index],
            world,
            job.plan.measure,
            share.seconds,
            progress,
            subgroups=subgroups,
            fault=job.plan.injection,
        )
    else:
        outcome = Outcome(status="skipped", reason=LEFT_OUT)
    if world.rank == 0:
        client.say(Finished(index=index, outcome=outcome))
    if outcome.explained:
        gc.collect()  # a step's model and groups hold each other in cycles: their memory and threads would stay


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _hello(meeting: str) -> Hello:
    return Hello(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        host=socket.gethostname(),
        pid=os.getpid(),
        place=rank_place(socket.gethostname(), os.environ, _gpu_uuid()),
        environment={**capture(os.environ), "torch": _torch_environment()},
        meeting=meeting,
        step=_step(os.environ),
    )


def _step(environ: Mapping[str, str]) -> str:
    """Return this rank's job step as ``JOB.STEP``, nothing outside one."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    return ".".join(environ[name] for name in names) if all(name in environ for name in names) else ""


def _local_gpu() -> int | None:
    """Return the index of this rank's GPU among those it sees, None without one."""
    if not torch.cuda.is_available():
        return None
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def _gpu_uuid() -> str | None:
    """Return the UUID of this rank's GPU without nvidia-smi's prefix, None without one."""
    local = _local_gpu()
    return None if local is None else str(torch.cuda.get_device_properties(local).uuid).removeprefix("GPU-")


def _torch_environment() -> dict[str, Any]:
    """Return what only torch knows of this rank."""
    facts: dict[str, Any] = {
        "version": importlib.metadata.version("torch"),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    local = _local_gpu()
    if local is not None:
        facts["gpu"] = torch.cuda.get_device_name(local)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


if __name__ == "__main__":
    main()
