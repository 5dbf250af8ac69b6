"""The program of one rank: it reports its environment, receives its job, and measures its cases.

``python -m parbench.bench.rank.worker`` is the rank that these environment variables describe:
RANK, WORLD_SIZE and LOCAL_RANK, or srun's variables SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
PARBENCH_FOLDER is the folder for files of this start of ranks. If torchrun or mpirun has started
parbench, PARBENCH_STORE is this start's prefix in the store at MASTER_ADDR:MASTER_PORT.

A job lists cases and their blocks. A block is a part of the samples of a case, and blocks of
different cases are interleaved. The driver is the process that starts the ranks and writes their
results.
"""

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from parbench.bench.launch.external import (
    STORE_VARIABLE,
    StoreMailbox,
    connect_store,
    open_store,
)
from parbench.bench.launch.launchers import FOLDER_VARIABLE
from parbench.bench.launch.messages import (
    ADDRESSES,
    JOB,
    JOB_DECODER,
    OUT_OF_BUDGET,
    Hello,
    Job,
    JobDone,
    Mailbox,
    RankError,
    wait_for,
)
from parbench.bench.launch.processes import exit_now, get_process_space
from parbench.bench.launch.ranks import START_SECONDS
from parbench.bench.machine.environment import capture_environment, find_interface, locate_rank
from parbench.bench.machine.gpu import choose_gpu_index
from parbench.bench.machine.gpu_host import BIND_VARIABLE, bind_to_gpu, read_numa_node
from parbench.bench.machine.gpu_inventory import capture_gpu
from parbench.bench.machine.slurm_allocation import INTERFACE_VARIABLE, list_host_addresses
from parbench.bench.plan.plan import get_case_weight
from parbench.bench.rank.progress import Progress
from parbench.bench.rank.runner import CaseRun
from parbench.bench.rank.watchdog import Watchdog
from parbench.bench.world import accelerator
from parbench.bench.world.world import World, disable_tf32, open_world

_JOB_SECONDS = 600.0
"""The seconds that a rank waits for its cases from the driver, which may have ended."""
_MIN_BLOCK_SECONDS = 0.02
"""The least time in seconds for a block of samples.

If the time budget is over, it applies to the first block of a case only.
"""
_TIMEOUT_SHARE = 0.5
"""The largest fraction of the timeout that the samples of a block may take.

Without this limit, a single case would take the whole time budget unless its median is precise.
"""
_PAUSE_SECONDS = 0.01
"""The least time in seconds between two successive blocks of samples of the same case.

A disturbance of a few milliseconds then affects only one of the blocks.
"""
_CONNECT_SECONDS = 10.0
"""The seconds that a connection to an address of rank 0's store may take, and then its answer."""
_SRUN_VARIABLES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
"""The variable in which srun states the value, by name of torch's variable."""


def main() -> None:
    """Run the rank that the environment variables describe, then exit with code 0."""
    if "RANK" not in os.environ:
        for name, slurm_name in _SRUN_VARIABLES.items():
            os.environ[name] = os.environ[slurm_name]
    folder = Path(os.environ[FOLDER_VARIABLE])
    prefix = os.environ.get(STORE_VARIABLE)
    if prefix is None:
        run_rank(Mailbox(folder), None, folder)
    else:
        # A client of a store does one operation at a time, and the watchdog may need it while
        # this thread waits.
        mail_store = PrefixStore(f"{prefix}/mail", connect_store(os.environ))
        store = PrefixStore(f"{prefix}/ranks", connect_store(os.environ))
        run_rank(StoreMailbox(mail_store), store, folder)
    exit_now(0)


def run_rank(mailbox: Mailbox, store: Store | None, folder: Path) -> None:
    """Send this rank's environment to the driver, then measure the cases that the driver sends.

    The driver is the process that starts the ranks. If an exception is raised, this function sends
    the exception to the driver and never returns.

    Args:
        mailbox: carries the messages between this rank and the driver.
        store: the torch store in which ranks find each other, None if rank 0 is to serve a new one.
        folder: the folder for the file with the Python stacks of this rank, if it hangs.
    """
    rank = int(os.environ["RANK"])
    progress = Progress()
    watchdog = Watchdog(rank, mailbox, progress, folder / f"rank-{rank}.stack")
    try:
        bind_to_near_cpus(os.environ)
        if is_on_one_host(os.environ):
            choose_interface("127.0.0.1", os.environ)
        if store is None:
            own_store = meet_ranks(mailbox, os.environ)
            watchdog.store_address = own_store.host, own_store.port
            store = own_store
        mailbox.post(rank, make_hello(os.environ))
        job = JOB_DECODER.decode(wait_for(mailbox, JOB, _JOB_SECONDS))
        plan = job.plan
        began = time.process_time()
        # Before the first block ranks may take long to find each other.
        watchdog.begin(-1, max(plan.timeout_seconds, START_SECONDS))
        if plan.path is not None:
            sys.path.append(plan.path)
        timeout_seconds = 2 * plan.timeout_seconds + 60
        with open_world(
            plan.backend, plan.device, plan.measure.seed, timeout_seconds, store
        ) as world:
            measure_cases(job, world, progress, watchdog, mailbox)
        mailbox.post(rank, JobDone(cpu_seconds=time.process_time() - began))
    except Exception as error:  # noqa: BLE001 - the driver reports it, whatever it is
        report_and_block(mailbox, rank, error)
    finally:
        watchdog.close()


def bind_to_near_cpus(environ: Mapping[str, str]) -> None:
    """Bind this rank to the CPUs of its GPU's NUMA node, if ``PARBENCH_BIND`` is 1.

    The driver sets the variable to 1 if ranks use GPUs and the launcher does not bind them. A
    launcher that does not set ``LOCAL_WORLD_SIZE`` hides which ranks share this host.
    """
    if environ.get(BIND_VARIABLE) != "1" or "LOCAL_WORLD_SIZE" not in environ:
        return
    count = accelerator.count_devices()
    local_ranks = range(int(environ["LOCAL_WORLD_SIZE"]))
    addresses = [accelerator.get_properties(rank % count).pci_address for rank in local_ranks]
    bind_to_gpu(int(environ["LOCAL_RANK"]), addresses)


def meet_ranks(mailbox: Mailbox, environ: MutableMapping[str, str]) -> TCPStore:
    """Return the torch store in which ranks find each other, and choose gloo's interface.

    Rank 0 serves the store and puts its addresses into the mailbox, from which other ranks read
    them. ``GLOO_SOCKET_IFNAME`` is set in ``environ`` to the interface of the connection, unless
    the user has set it.
    """
    hosts = ["127.0.0.1"] if is_on_one_host(environ) else list(list_host_addresses(environ))
    if environ["RANK"] == "0":
        # The server listens on all interfaces; the host is for its own client.
        store = open_store("127.0.0.1", 0, is_server=True)
        mailbox.put(ADDRESSES, msgspec.json.encode([(host, store.port) for host in hosts]))
        own_address = hosts[0]
    else:
        content = wait_for(mailbox, ADDRESSES, START_SECONDS)
        addresses = msgspec.json.decode(content, type=list[tuple[str, int]])
        # An address that this host has too leads to this host. Bridges of containers are such.
        other_addresses = [address for address in addresses if address[0] not in hosts]
        store, own_address = _connect(other_addresses or addresses)
    choose_interface(own_address, environ)
    return store


def is_on_one_host(environ: Mapping[str, str]) -> bool:
    """Return True if LOCAL_WORLD_SIZE equals WORLD_SIZE, so that all ranks share this host."""
    return environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]


def choose_interface(address: str, environ: MutableMapping[str, str]) -> None:
    """Let gloo connect ranks through this host's network interface with an IP address.

    The name of the interface is stored in ``environ`` as ``GLOO_SOCKET_IFNAME``, unless the user
    has set this variable. Without it, gloo looks the host name up, which may mean 127.0.1.1.
    """
    interface = find_interface(address)
    if interface is not None:
        environ.setdefault(INTERFACE_VARIABLE, interface)


def _connect(addresses: list[tuple[str, int]]) -> tuple[TCPStore, str]:
    """Connect to the store of rank 0 at the first of its addresses that answers.

    ``addresses`` are pairs of a host and a port. Returns the store and the IP address of this host
    on the connection. Raises ``ConnectionError`` if none answers.
    """
    for host, port in addresses:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as connection:
                own_address = str(connection.getsockname()[0])
            # torch waits without a limit for the answer of a server.
            client = ThreadPoolExecutor().submit(open_store, host, port, is_server=False)
            return client.result(_CONNECT_SECONDS), own_address
        except (OSError, RuntimeError) as error:
            failure = error
    raise ConnectionError(f"no answer from rank 0 at {addresses}: {failure}") from failure


def measure_cases(
    job: Job, world: World, progress: Progress, watchdog: Watchdog, mailbox: Mailbox
) -> None:
    """Measure the cases of a job block by block. Rank 0 sends the driver a result for each block.

    A job is the work of one start of all ranks. A block is a part of the samples of one case, and
    the blocks of different cases are interleaved. A case whose first block does not begin within
    ``job.run_seconds`` is reported as out of budget. A case whose later block does not begin within
    ``job.budget_seconds`` ends with one more sample.

    Args:
        job: the cases, the order of their blocks, and the time limits.
        world: all ranks of the run.
        progress: stores the position in the current case, for reports about a hang.
        watchdog: is started for each block, and reports a step that exceeds its timeout.
        mailbox: carries the results to the driver.
    """
    began = time.monotonic()
    remaining = Counter(job.blocks)
    runs: dict[int, CaseRun] = {}
    ends: dict[int, float] = {}  # the time at which the last block of each case ended
    shares = compute_block_shares(job)
    for number, index in enumerate(job.blocks):
        if not remaining[index]:
            continue
        remaining[index] -= 1
        num_later = remaining[index]
        watchdog.begin(number, job.plan.timeout_seconds)
        world.recalibrate_stale_clock()
        if index in ends:
            time.sleep(max(_PAUSE_SECONDS - (time.monotonic() - ends[index]), 0.0))
        [elapsed] = world.broadcast_from_rank_0([time.monotonic() - began])
        is_new = index not in runs
        if is_new:
            case = job.plan.cases[index]
            runs[index] = CaseRun(case, world, job.plan.measure, progress, job.plan.injection)
        if is_new and elapsed >= job.run_seconds:
            outcome = OUT_OF_BUDGET
        elif is_new or elapsed < job.budget_seconds:
            seconds = compute_block_seconds(job, shares[number], elapsed)
            is_only = is_new and num_later == 0
            outcome = runs[index].run_block(seconds, num_later, is_only=is_only)
        else:
            outcome = runs[index].run_block(0.0, num_later=0, is_only=False)
        ends[index] = time.monotonic()
        if world.global_rank == 0:
            mailbox.post(0, outcome)
        if not outcome.more:
            remaining[index] = 0
            del runs[index]
            if job.plan.cases[index].is_step:
                # Its model and groups hold each other in cycles, with their memory and threads.
                gc.collect()


def compute_block_shares(job: Job) -> list[float]:
    """Return the share of each block of a job in the time that is left when the block begins.

    The time is shared by the block and all later blocks in proportion to the weights of their cases
    (20 for a training step, 10 for a custom step, 1 for any other), each divided by the number of
    blocks of the case.
    """
    counts = Counter(job.blocks)
    shares = []
    total = 0.0
    for index in reversed(job.blocks):
        weight = get_case_weight(job.plan.cases[index]) / counts[index]
        total += weight
        shares.append(weight / total)
    return shares[::-1]


def compute_block_seconds(job: Job, share: float, elapsed: float) -> float:
    """Return the seconds that a block of samples may take, given its ``share`` of the time left.

    ``elapsed`` are the seconds since the start of the job. The result is at least 0.02 s and at
    most half of the timeout.
    """
    max_seconds = _TIMEOUT_SHARE * job.plan.timeout_seconds
    return min(max(share * (job.budget_seconds - elapsed), _MIN_BLOCK_SECONDS), max_seconds)


def report_and_block(mailbox: Mailbox, rank: int, error: Exception) -> None:
    """Send the driver an exception with its stack, then wait until the driver ends this process.

    This rank does not exit, because other ranks would then raise exceptions too, which could arrive
    at the driver before the cause.
    """
    first_line = summarize_error(error, os.environ)
    traceback.print_exc()
    mailbox.post(
        rank, RankError(error=first_line, stack=traceback.format_exc(), seconds=time.time())
    )
    threading.Event().wait()


def summarize_error(error: Exception, environ: Mapping[str, str]) -> str:
    """Return the first line of an exception, with the name of an interface that gloo cannot use."""
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    interface = environ.get(INTERFACE_VARIABLE)
    if interface and "find address" in first_line:
        first_line += f" ({INTERFACE_VARIABLE}={interface})"
    return first_line


def make_hello(environ: Mapping[str, str]) -> Hello:
    """Return this rank's first message to the driver, with its host, process and environment.

    It also has the CPUs and the GPU of the rank. CUDA is initialized only if ``PARBENCH_DEVICE`` is
    ``cuda``.
    """
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    environment = {**capture_environment(environ), "torch": facts}
    uuid = None
    numa_node = None
    if environ.get("PARBENCH_DEVICE") == "cuda":
        index = choose_gpu_index(environ, accelerator.count_devices())
        device = accelerator.get_properties(index)
        uuid = device.uuid
        numa_node = read_numa_node(device.pci_address)
        facts["gpu"] = device.name
        facts["nccl"] = accelerator.find_library_version()
        facts["float32_matmul"] = disable_tf32()
        environment |= capture_gpu(environ, uuid)
        environment["gpu"]["l2_cache_bytes"] = device.l2_cache_bytes  # which NVML does not report
    step_id = environ.get("SLURM_STEP_ID")
    host = socket.gethostname()
    return Hello(
        rank=int(environ["RANK"]),
        host=host,
        pid=os.getpid(),
        process_space=get_process_space(),
        place=locate_rank(host, environ, uuid, numa_node),
        environment=environment,
        step=f"{environ['SLURM_JOB_ID']}.{step_id}" if step_id else "",
    )


if __name__ == "__main__":
    main()
