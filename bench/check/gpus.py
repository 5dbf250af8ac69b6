"""Faults of GPUs that NVIDIA's driver reports before, during and after a measurement."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from parbench.bench.check.health import Device, Fault
from parbench.bench.machine.disturbance import Disturbance
from parbench.bench.machine.gpu import (
    GPU_FIX,
    POWER_CAP,
    Gpu,
    GpuReport,
    finish_nvml,
    start_nvml,
)
from parbench.bench.machine.gpu_topics import NVLINK_FIX, examine_gpu, list_slowdowns

_BAD_TOPICS = ("memory", "pcie", "nvlink")
# An increase of these counters of NVLink is a fault. An increase of others should be watched.
_BAD_COUNTERS = (
    "replay errors",
    "recovery errors",
    "link recovery failed events",
    "effective errors",
)
T = TypeVar("T")


def run_watched(
    environ: Mapping[str, str], gpus: Sequence[Gpu], work: Callable[[], T]
) -> tuple[T, GpuReport]:
    """Call the function ``work`` while a child process samples the GPUs once per second.

    Returns a pair: the result of ``work``, and NVML's report of this host's GPUs after ``work``. In
    the report, clocks, load and temperature are the maxima during ``work``. If ``gpus`` (the GPUs
    to measure) is empty, nothing is sampled and the report is empty.
    """
    if not gpus:
        return work(), GpuReport()
    child = start_nvml(environ, "watch")
    try:
        result = work()
    finally:
        report = finish_nvml(child)
    return result, report


def add_gpu_facts(
    devices: Sequence[Device], gpus: Sequence[Gpu], report: GpuReport
) -> tuple[Device, ...]:
    """Return the devices with the state of their GPUs as ``facts`` and with faults as ``reasons``.

    ``gpus`` holds the GPU of each device in the same order, as NVML reported it before the
    measurement. ``report`` is NVML's report after the measurement. Faults are disturbing states,
    increased NVLink error counters, and a GPU that does not answer any more.
    """
    reported = {gpu.uuid: gpu for gpu in report.gpus}
    # Ranks may still use a GPU after the work. Only the processes before it are not our own.
    latest = [replace(reported.get(gpu.uuid, gpu), processes=gpu.processes) for gpu in gpus]
    complete = []
    for device, before, after in zip(devices, gpus, latest, strict=True):
        findings = examine_gpu(after, [gpu for gpu in latest if gpu.name == after.name])
        link_errors = dict(Counter(after.nvlink_errors) - Counter(before.nvlink_errors))
        reasons = find_faults(after, findings, link_errors)
        if report.failure and before.uuid not in reported:
            text = f"does not answer any more: {report.failure}"
            reasons = (*reasons, Fault(text=text, fix=GPU_FIX))
        facts = {finding.topic: finding.facts for finding in findings}
        complete.append(replace(device, facts=facts, reasons=reasons))
    return tuple(complete)


def find_faults(
    gpu: Gpu, findings: Sequence[Disturbance], link_errors: Mapping[str, int]
) -> tuple[Fault, ...]:
    """Return the faults of a GPU: disturbing states such as low clocks, and new NVLink errors.

    ``findings`` are those of ``examine_gpu``. ``link_errors`` holds the increases of the GPU's
    NVLink error counters during the measurement, by name. A software power cap is not a fault,
    because matrix multiplications reach it on a good GPU.
    """
    slowdowns = list_slowdowns(gpu)
    is_halted = any(reason.startswith("hardware") for reason in slowdowns)
    faults = []
    for finding in findings:
        is_clocks = finding.topic == "clocks"
        if finding.disturbs and not (is_clocks and set(slowdowns) == {POWER_CAP}):
            text = f"{finding.topic}: {finding.facts}"
            is_bad = finding.topic in _BAD_TOPICS or (is_clocks and is_halted)
            faults.append(Fault(text=text, fix=finding.fix, is_bad=is_bad))
    for name, count in link_errors.items():
        text = f"NVLink: {count} more {name} meanwhile"
        faults.append(Fault(text=text, fix=NVLINK_FIX, is_bad=name in _BAD_COUNTERS))
    return tuple(faults)
