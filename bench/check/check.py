"""``parbench check``: verifies that all GPUs or cores of this host are healthy, within a minute."""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from parbench.bench.check.cases import make_options
from parbench.bench.check.gpus import list_gpus
from parbench.bench.check.health import MISSING_GPU_FIX, Device, Health, add_run
from parbench.bench.check.infiniband import find_port_faults, read_ports
from parbench.bench.launch.measure import run_options
from parbench.bench.machine.environment import EMULATED_VARIABLE, format_cpus, group_cores
from parbench.bench.machine.gpu import GPU_FIX, read_report
from parbench.bench.machine.machine import (
    Machine,
    get_affinity,
    inspect_machine,
    list_gpu_addresses,
)
from parbench.bench.machine.world_spec import Joined, make_launcher_error
from parbench.bench.results.runs import load_run
from parbench.bench.text import UserError, pluralize, strip_domain

_MAX_CORE_GROUPS = 8
"""The largest default number of groups of cores."""
DEFAULT_BUDGETS = {"cpu": "40s", "cuda": "60s"}
"""The default of ``--budget``, the time for all measurements, by type of device."""


def check(
    modules: Sequence[str],
    environ: Mapping[str, str],
    *,
    device: str | None,
    nproc: int | None,
    budget: str | None,
    out: Path,
    inject: str | None,
) -> Health:
    """Measure the GPUs or cores of this host, examine their state, and return the verdicts.

    Args:
        modules: the names of the Python modules that define benchmarks in their ``DEFINITIONS``.
        environ: the environment variables.
        device: ``cuda`` or ``cpu``. None stands for GPUs if there are any, otherwise for cores.
        nproc: the number of GPUs or groups of cores. None stands for all GPUs or up to 8 groups.
        budget: the time for all measurements, such as ``40s``. None stands for ``DEFAULT_BUDGETS``.
        out: the folder for the results of the run.
        inject: a fault to simulate, such as ``slow:1:20%`` for rank 1, None for no fault.

    Raises ``UserError`` if the check cannot start.
    """
    if Joined.find(environ) is not None:
        raise make_launcher_error("parbench check")
    start = time.monotonic()
    machine = inspect_machine(environ)
    host = strip_domain(socket.gethostname())
    absent_gpus = () if device == "cpu" else _list_absent_gpus(host, machine, device, nproc)
    device = device or ("cuda" if machine.gpus or absent_gpus else "cpu")
    selects_all_gpus = nproc is None and "CUDA_VISIBLE_DEVICES" not in environ
    health = Health(
        host=host,
        device=device,
        devices=absent_gpus,
        emulated=EMULATED_VARIABLE in environ,
        notes=_list_gpu_notes(machine) if selects_all_gpus and device == "cuda" else (),
    )
    gpus = machine.gpus[:nproc] if device == "cuda" else ()
    if device == "cuda" and not gpus:
        return replace(health, problems=("no GPU answers, so nothing was measured",))
    nproc = len(gpus) or nproc or min(_MAX_CORE_GROUPS, machine.cores)
    core_sets = () if gpus else group_cores(nproc, get_affinity())
    if not gpus and len(core_sets) < nproc:  # Ranks that share a core are not devices.
        cores = pluralize(len(core_sets), "core")
        raise UserError(f"--nproc {nproc}: only {cores} can be used, and each group needs one")
    budget = budget or DEFAULT_BUDGETS[device]
    options = make_options(device, nproc, budget=budget, inject=inject)
    ports = read_ports()
    path = run_options(options, modules, out=out, cpus=core_sets, command="parbench check")
    assert path is not None, "only a rank that joins has no run"
    if gpus:
        devices = list_gpus(host, gpus, read_report(environ))
    else:
        devices = _list_cores(host, core_sets)
    health = add_run(health, devices, load_run(path))
    return replace(
        health,
        links=(*health.links, *find_port_faults(ports, read_ports())),
        seconds=round(time.monotonic() - start, 1),
    )


def _list_absent_gpus(
    host: str, machine: Machine, device: str | None, nproc: int | None
) -> tuple[Device, ...]:
    """Return the GPUs of this host that cannot be measured, as devices with the verdict ``bad``.

    They are the GPUs that do not answer to NVML, and one device that stands for all missing GPUs if
    the host has fewer than ``nproc``. ``device`` is the option ``--device``. If it is None, a host
    without any GPU is a host of cores, on which no GPU is missing.
    """
    absent_gpus = [
        Device.make_absent(host, f"GPU {name}", f"does not answer: {machine.gpu_failure}", GPU_FIX)
        for name in machine.silent_gpus
    ]
    num_present = len(machine.gpus) + len(absent_gpus)
    if nproc is not None and nproc > num_present and (num_present or device == "cuda"):
        text = f"{num_present} of {nproc} GPUs (--nproc) are present"
        absent_gpus.append(Device.make_absent(host, "missing GPU", text, MISSING_GPU_FIX))
    return tuple(absent_gpus)


def _list_gpu_notes(machine: Machine) -> tuple[str, ...]:
    """Return a sentence about GPUs of this host that NVML does not list, if there are any.

    They may be hidden on purpose, as in a container.
    """
    num_listed = len(machine.gpus + machine.silent_gpus)
    num_present = len(list_gpu_addresses())
    note = (
        f"NVML lists {num_listed} of {num_present} NVIDIA GPUs of this host; "
        f"if none is hidden on purpose: --nproc {num_present}"
    )
    return (note,) if num_listed < num_present else ()


def _list_cores(host: str, core_sets: Sequence[Sequence[int]]) -> tuple[Device, ...]:
    """Return a ``Device`` for each group of CPUs, with its name, its kind and its rank.

    The rates of the devices are still empty, because ``add_run`` adds them after the measurement.
    ``core_sets`` holds the CPU numbers of each group, in the order of the ranks that measure the
    groups.
    """
    return tuple(
        Device(
            host=host,
            name=f"CPU {format_cpus(cores)}",
            kind=f"cores ({len(core_sets[0])})",
            is_gpu=False,
            rank=rank,
        )
        for rank, cores in enumerate(core_sets)
    )


def to_document(health: Health) -> dict[str, object]:
    """Return the check of a host as the JSON object that ``--format json`` prints.

    It has the fields of ``Health``, the ``verdict`` and the exit code ``code`` of the host, and the
    ``verdict`` of each device.
    """
    devices = [
        {"verdict": device.verdict, **msgspec.to_builtins(device)} for device in health.devices
    ]
    facts: dict[str, object] = msgspec.to_builtins(health)
    return {"verdict": health.verdict, "code": health.exit_code, **facts, "devices": devices}
