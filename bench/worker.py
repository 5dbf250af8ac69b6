"""One rank: tells the driver who it is, takes its job, and does one case after another."""

import importlib.metadata
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from bench.channel import ADDRESS_VARIABLE, KEY_VARIABLE, Line
from bench.environment import capture
from bench.messages import Broken, Bye, Finished, Hello, Job, Started
from bench.parent import die_with_parent
from bench.progress import Progress
from bench.runner import run_case
from bench.world import World, open_world

_MIN_CASE_SECONDS = 0.02


def main() -> None:
    """Do the driver's job as the rank that RANK names, in a process of its own."""
    die_with_parent(signal.SIGKILL)
    work(os.environ[ADDRESS_VARIABLE], os.environ[KEY_VARIABLE])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way out takes a noticeable part of a launch


def work(address: str, key: str, store: Store | None = None, *, with_driver: bool = False) -> None:
    """Connect to the driver at ``address`` and do its job.

    This process ends when the driver goes before the job is done, unless the driver lives in it (``with_driver``).
    ``store`` is the rendezvous already made, if there is one.
    """
    line = Line(address, key)
    done = threading.Event()

    def end() -> None:
        if not (with_driver or done.is_set()):
            os._exit(1)

    line.say(_hello())
    job = line.hear()
    if not isinstance(job, Job):
        end()
        return
    progress = Progress()
    line.listen(answer=progress.where, on_gone=end)
    try:
        if job.path is not None:
            sys.path.append(job.path)
        timeout = 2 * job.timeout_seconds + 60
        with open_world(job.backend, job.device, job.measure.seed, timeout, store) as world:
            _cases(line, job, world, progress)
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver is told
        _stand_still(line, None, error)
    done.set()
    line.say(Bye())


def _cases(line: Line, job: Job, world: World, progress: Progress) -> None:
    for index, budget_seconds in _budgets(job):
        try:
            _one_case(line, job, index, budget_seconds, world, progress)
        except Exception as error:  # noqa: BLE001 - whatever a case raises is told to the driver
            # before this rank leaves the world: ranks that miss it raise too, and the first to tell is named
            _stand_still(line, index, error)


def _stand_still(line: Line, index: int | None, error: Exception) -> None:
    """Tell the driver what was raised, and wait for the end: the driver ends the gang."""
    line.say(Broken(index=index, error=_sentence(error), stack=traceback.format_exc()))
    threading.Event().wait()


def _budgets(job: Job) -> Iterator[tuple[int, float]]:
    """Yield each case's index with its fair share of the time that is left."""
    deadline = time.monotonic() + job.budget_seconds
    for index in range(len(job.cases)):
        left = deadline - time.monotonic()
        weights = job.weights[index:]
        yield index, max(left * weights[0] / sum(weights), _MIN_CASE_SECONDS)


def _one_case(line: Line, job: Job, index: int, budget_seconds: float, world: World, progress: Progress) -> None:
    line.say(Started(index=index))
    outcome = run_case(job.cases[index], world, job.measure, budget_seconds, progress)
    if world.rank == 0:
        line.say(Finished(index=index, outcome=outcome))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _hello() -> Hello:
    return Hello(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        host=socket.gethostname(),
        pid=os.getpid(),
        environment={**capture(os.environ), "torch": _torch_environment()},
    )


def _torch_environment() -> dict[str, Any]:
    """Return what only torch knows of this rank."""
    facts: dict[str, Any] = {
        "version": importlib.metadata.version("torch"),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        facts["gpu"] = torch.cuda.get_device_name(local)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


if __name__ == "__main__":
    main()
