"""``parbench check``: is every device of this host well? Measures for less than a minute, and says what to do."""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from parbench.bench.check.cases import options_of
from parbench.bench.check.gpus import Watch, complaints, facts_of
from parbench.bench.check.health import FLOORS, Device, Health, Reason, compared, measured, problems_of
from parbench.bench.check.infiniband import judged, ports
from parbench.bench.launch.measure import run_options
from parbench.bench.machine.doctor import examine_here
from parbench.bench.machine.environment import EMULATED_VARIABLE, core_groups, format_cpus
from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine, inspect_machine
from parbench.bench.machine.silent_gpus import describe_silent_gpus, suggest_fix
from parbench.bench.machine.world_spec import Joined
from parbench.bench.results.runs import load_run, utc_now
from parbench.bench.text import UserError, counted, short_host

_MOST_GROUPS = 8
_OF_THE_HOST = ("cores", "load average", "cpu governor", "steal time", "memory", "/dev/shm", "swap", "gpu driver")


def check(
    modules: Sequence[str],
    environ: Mapping[str, str],
    *,
    device: str | None,
    nproc: int | None,
    budget: str,
    timeout: str,
    out: Path,
    inject: str | None,
) -> Health:
    """Check this host; times are as written, None is what the machine decides. ``UserError`` if it cannot be had."""
    if Joined.find(environ) is not None:
        raise UserError("parbench check starts its own ranks, and RANK is set: start it by itself, once on each host")
    began, started, machine = time.monotonic(), utc_now(), inspect_machine(environ)
    host = short_host(socket.gethostname())
    silent = () if device == "cpu" else _of_silent_gpus(host, machine)
    if silent and not machine.gpus:
        seconds = round(time.monotonic() - began, 1)
        problems = ("no GPU answers, so nothing was measured",)
        return Health(host=host, started=started, seconds=seconds, device="cuda", devices=silent, problems=problems)
    device = device or ("cuda" if machine.gpus else "cpu")
    gpus = machine.gpus if device == "cuda" else ()
    nproc = nproc or (len(gpus) if gpus else min(_MOST_GROUPS, machine.cores))
    groups = core_groups(nproc) if device == "cpu" else ()
    if device == "cpu" and len(groups) < nproc:  # a rank that is no device could be slow or wrong unseen
        raise UserError(f"--nproc {nproc}: this process may use {counted(len(groups), 'core')}, one for each at most")
    devices = _of_cores(host, groups) if device == "cpu" else _of_gpus(host, gpus[:nproc])
    findings = examine_here(environ, gpus=bool(gpus))  # before work of our own
    notes = [f"{f.topic}: {f.found} -> {f.remedy}" for f in findings if f.disturbs and f.topic in _OF_THE_HOST]
    before = ports()
    options = options_of(device, nproc, budget=budget, timeout=timeout, inject=inject)
    with Watch(environ, gpus) as watch:
        path = run_options(options, modules, out=out, resume_path=None, as_json=False, cpus=groups)
    assert path is not None, "only a rank that joins has no run"
    run = load_run(path)
    devices = _with_facts(devices, watch)
    devices, links, together = measured(devices, run)
    emulated = EMULATED_VARIABLE in environ  # nodes that share a machine's cores, which are nobody's own
    devices, links = (devices, ()) if emulated else (compared(devices, FLOORS[device]), links)
    return Health(
        host=host,
        started=started,
        seconds=round(time.monotonic() - began, 1),
        device=device,
        driver=next((gpu.driver for gpu in gpus if gpu.driver), "-"),
        devices=(*devices, *silent),
        links=links,
        ports=judged(before, ports()),
        together=together,
        problems=problems_of(run),
        notes=(*notes, *run.info.plan.limitations),
        run=str(path),
        emulated=emulated,
    )


def _of_cores(host: str, groups: Sequence[Sequence[int]]) -> tuple[Device, ...]:
    sizes = f"cores ({len(groups[0])})"
    named = [f"core{'s' if len(group) > 1 else ''} {format_cpus(group)}" for group in groups]
    return tuple(
        Device(host=host, name=name, uuid=f"{host} {name}", kind=sizes, rank=rank) for rank, name in enumerate(named)
    )


def _of_gpus(host: str, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    return tuple(
        Device(
            host=host,
            name=f"GPU {rank if gpu.index is None else gpu.index}",
            uuid=gpu.uuid or f"{host} GPU {rank}",
            kind=gpu.name or "GPU",
            rank=rank,
        )
        for rank, gpu in enumerate(gpus)
    )


def _of_silent_gpus(host: str, machine: Machine) -> tuple[Device, ...]:
    """Return the GPUs that do not answer, as bad devices; ``UserError`` where NVML is not installed."""
    failure = machine.gpu_failure
    remedy = suggest_fix(failure)
    if failure is not None and failure.kind == "no library" and machine.silent_gpus:
        problem = describe_silent_gpus(machine.silent_gpus, failure)
        raise UserError(f"{problem}; {remedy}; --device cpu checks the cores")
    text = f"does not answer: {failure.describe() if failure else 'NVML reports no error'}"
    reason = Reason(text=text, remedy=remedy)
    names = [f"GPU {address}" for address in machine.silent_gpus]
    return tuple(
        Device(host=host, name=name, uuid=f"{host} {name}", kind="GPU", rank=-1, reasons=(reason,), ran=False)
        for name in names
    )


def _with_facts(devices: Sequence[Device], watch: Watch) -> tuple[Device, ...]:
    by_uuid = {gpu.uuid: gpu for gpu in watch.gpus}
    told = []
    for device in devices:
        if gpu := by_uuid.get(device.uuid):
            alike = [one for one in by_uuid.values() if one.name == gpu.name]
            grown = watch.count_link_errors(gpu)
            facts, reasons = facts_of(gpu, alike, grown), complaints(gpu, alike, grown)
            loss = watch.find_loss(gpu)
            if loss is not None:
                reasons = (*reasons, loss)
            device = msgspec.structs.replace(device, facts=facts, reasons=reasons)
        told.append(device)
    return tuple(told)


def document(health: Health) -> dict[str, object]:
    """Return what ``--json`` prints: the check with its verdicts and exit code."""
    told: dict[str, object] = msgspec.to_builtins(health)
    devices = [{"verdict": one.verdict, **msgspec.to_builtins(one)} for one in health.devices]
    return {"verdict": health.verdict, "code": health.code, **told, "devices": devices}
