"""One rank, however it was started: tells the driver who it is, takes its job, and does one case after another."""

import gc
import importlib.metadata
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from parbench.bench.launch import control_channel as channel
from parbench.bench.launch.control_channel import Job, RankClient
from parbench.bench.launch.driver import StartRanks
from parbench.bench.launch.flight_recorder import groups_seen
from parbench.bench.launch.launchers import Launcher, loopback_variables
from parbench.bench.launch.processes import leave
from parbench.bench.launch.visits import spread_over_visits
from parbench.bench.machine.environment import capture, find_interface, locate_rank
from parbench.bench.machine.gpu import choose_gpu_index
from parbench.bench.machine.gpu_inventory import REPORT_VARIABLE, capture_gpu
from parbench.bench.machine.slurm_allocation import INTERFACE_VARIABLE
from parbench.bench.machine.world_spec import Joined
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.timing import Progress
from parbench.bench.world.torch_compat import dump_flight_records, nccl_version
from parbench.bench.world.world import World, disable_tf32, open_world

_MIN_CASE_SECONDS = 0.02
_TIMEOUT_SHARE = 0.5  # the rest is for preparing, checking and what cannot be cut short
_APART_SECONDS = 0.05  # between visits of a case: what slows a machine for milliseconds has passed by then
_DRIVER_KEY = "parbench/driver"
_open_store = partial(TCPStore, wait_for_workers=False, timeout=timedelta(seconds=120))


def main() -> None:
    """Do the driver's job as the rank that RANK names, or srun's variables where that is said."""
    if sys.argv[1:] == ["srun"]:
        names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        os.environ.update({name: os.environ[theirs] for name, theirs in names.items()})
    work(os.environ, meeting=Meeting(int(os.environ["RANK"])))
    leave(0)


def join(timeout_seconds: float) -> None:
    """Do this rank's part of the run that rank 0 drives; returns when it is done."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    _work_joined(msgspec.json.decode(store.get(_DRIVER_KEY), type=dict[str, str]), store)


def starter(timeout_seconds: float) -> StartRanks:
    """Return what starts the gang on rank 0: it tells the other ranks where the driver is, and works in a thread."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))

    def start(number: int, variables: Mapping[str, str]) -> Launcher:
        store.set(_DRIVER_KEY, msgspec.json.encode(variables).decode())
        threading.Thread(target=partial(_work_joined, variables, store, with_driver=True), daemon=True).start()
        return Launcher()

    return start


def _work_joined(variables: Mapping[str, str], store: Store, *, with_driver: bool = False) -> None:
    joined = Joined.find(os.environ)
    if joined is not None and joined.one_node:  # gloo takes the loopback interface, if the user has named none
        os.environ.update({**loopback_variables(), **os.environ})
    work(variables, PrefixStore("parbench", store), with_driver=with_driver)


class Meeting:
    """The store of all ranks where no launcher made one: rank 0 binds a port that is free, no computed one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: TCPStore | None = None

    def offer(self, own_address: str) -> str:
        """Bind the store on rank 0 and return where; nothing on other ranks. Gloo is told the interface, too."""
        if interface := find_interface(own_address):
            os.environ.setdefault(INTERFACE_VARIABLE, interface)  # a host name may mean 127.0.1.1
        if self._rank != 0:
            return ""
        self._store = _open_store(own_address, 0, is_master=True)
        return f"{own_address}:{self._store.port}"

    def join(self, where: str) -> Store:
        host, _, port = where.rpartition(":")
        return self._store or _open_store(host, int(port), is_master=False)


def work(
    driver: Mapping[str, str], store: Store | None = None, *, with_driver: bool = False, meeting: Meeting | None = None
) -> None:
    """Connect to the driver that these variables tell, and do its job.

    This process ends when the driver goes before the job is done, unless the driver lives in it (``with_driver``).
    ``store`` is the rendezvous already made, if there is one; ``meeting`` makes one with the driver's help.
    """
    client = RankClient(driver[channel.ADDRESS_VARIABLE], driver[channel.KEY_VARIABLE])
    done = threading.Event()

    def end() -> None:
        if not (with_driver or done.is_set()):
            os._exit(1)

    own_store = meeting.offer(client.own_address) if meeting else ""
    on_cuda, has_report = driver.get(channel.DEVICE_VARIABLE) == "cuda", driver.get(REPORT_VARIABLE) == "1"
    client.say(_hello(own_store, on_cuda=on_cuda, has_report=has_report))
    job = client.hear()
    if not isinstance(job, Job):
        end()
        return
    began, progress = time.process_time(), Progress()
    client.listen(answer=partial(_answers, progress), on_gone=end)
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
    client.say(channel.Done(cpu_seconds=time.process_time() - began))


def _answers(progress: Progress) -> Iterator[channel.StatusReply]:
    where = progress.where()
    yield msgspec.structs.replace(where, more=True)
    groups, dumps = dump_flight_records()
    seen = groups_seen(dumps, groups, progress.began_ns, time.time_ns())
    yield msgspec.structs.replace(where, groups=seen)


def _sit_down(hosts: Sequence[str]) -> None:
    """Tell torch this rank's place on its host, from the hosts that all ranks named."""
    here = [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]
    os.environ["LOCAL_RANK"] = str(here.index(int(os.environ["RANK"])))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(here))


def _cases(client: RankClient, job: Job, world: World, progress: Progress) -> None:
    clock = _LaunchClock(job)
    left, runs = Counter(job.visits), dict[int, CaseRun]()
    for number, index in enumerate(job.visits):
        if not left[index]:
            continue
        left[index] -= 1
        try:
            progress.began_ns = time.time_ns()
            client.say(channel.Started(index=number))
            world.refresh_clock()
            seconds = clock.share(number, left.total())
            [may_begin, may_go_on] = world.decide(clock.allows(index))
            if may_begin and index not in runs:
                case, measure, fault = job.plan.cases[index], job.plan.measure, job.plan.injection
                runs[index] = CaseRun(case, world, measure, progress, fault)
                outcome = runs[index].visit(seconds, left[index], alone=not left[index])
            elif may_go_on:
                outcome = runs[index].visit(seconds, left[index], alone=False)
            else:
                outcome = runs[index].end() if index in runs else channel.OUT_OF_BUDGET
            clock.left(index)
            if world.rank == 0:
                client.say(channel.Finished(index=number, outcome=outcome))
            if not outcome.more:
                left[index] = 0
                runs.pop(index, None)
            if outcome.explained:
                gc.collect()  # a step's model and groups hold each other in cycles: their memory and threads would stay
        except Exception as error:  # noqa: BLE001 - whatever a case raises is told to the driver
            # before this rank leaves the world: ranks that miss it raise too, and the first to tell is named
            _stand_still(client, number, error)


class _LaunchClock:
    """Shares the launch's time among visits; rank 0's counts."""

    def __init__(self, job: Job) -> None:
        self._job, self._began = job, time.monotonic()
        self._weights = spread_over_visits(job, job.weights)
        self._prices = spread_over_visits(job, job.prices or [0.0] * len(job.weights))
        self._left = dict[int, float]()

    def share(self, number: int, to_come: int = 0) -> float:
        """Return a visit's part (s) of the time that is left when its turn comes, ``to_come`` others after it."""
        left = self._job.budget_seconds - (time.monotonic() - self._began)
        weights, prices = sum(self._weights[number:]), sum(self._prices[number:])
        share = left / (1 + to_come)
        if weights:
            free = max(left - prices, 0.0) * self._weights[number] / weights
            share = free + self._prices[number] * min(left / prices if prices else 0.0, 1.0)
        return min(max(share, _MIN_CASE_SECONDS), _TIMEOUT_SHARE * self._job.plan.timeout_seconds)

    def allows(self, index: int) -> list[float]:
        """Say whether there is time to begin a case, and to visit one again, once it was left for long enough."""
        if index in self._left:
            time.sleep(max(0.0, _APART_SECONDS - (time.monotonic() - self._left[index])))
        spent = time.monotonic() - self._began
        return [float(spent < self._job.run_seconds), float(index in self._left and spent < self._job.budget_seconds)]

    def left(self, index: int) -> None:
        self._left[index] = time.monotonic()


def _stand_still(client: RankClient, index: int | None, error: Exception) -> None:
    """Tell the driver what was raised, and wait for the end: the driver ends the gang."""
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    client.say(channel.Raised(index=index, error=told, stack=traceback.format_exc()))
    threading.Event().wait()


def _hello(meeting: str, *, on_cuda: bool, has_report: bool = False) -> channel.Hello:
    uuid, device = None, None
    facts: dict[str, Any] = {
        "version": importlib.metadata.version("torch"),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    if on_cuda and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(choose_gpu_index(os.environ, torch.cuda.device_count()))
        uuid = f"GPU-{str(device.uuid).removeprefix('GPU-')}"  # as NVML writes it
        facts["gpu"] = device.name
        facts["nccl"] = nccl_version()
        facts["float32_matmul"] = disable_tf32()
    environment = {**capture(os.environ), "torch": facts}
    if device is not None and uuid is not None:
        environment |= capture_gpu(os.environ, uuid, has_report=has_report)
        environment["gpu"]["l2_cache_bytes"] = device.L2_cache_size  # which NVML does not report
    in_step = {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= os.environ.keys()
    return channel.Hello(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        host=socket.gethostname(),
        pid=os.getpid(),
        place=locate_rank(socket.gethostname(), os.environ, uuid),
        environment=environment,
        meeting=meeting,
        step="{SLURM_JOB_ID}.{SLURM_STEP_ID}".format_map(os.environ) if in_step else "",
    )


if __name__ == "__main__":
    main()
