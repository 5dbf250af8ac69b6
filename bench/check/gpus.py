"""The GPUs of a check, with the faults that NVIDIA's driver reports after the measurement."""

from collections.abc import Sequence

from msgspec.structs import replace

from parbench.bench.check.health import Device, Fault
from parbench.bench.machine.gpu import GPU_FIX, Gpu, GpuReport
from parbench.bench.machine.gpu_topics import examine_gpu

_BAD_TOPICS = ("memory errors", "pcie", "nvlink")
_HEAT_FIX = "check its temperature (nvidia-smi -q -d TEMPERATURE), fans, air flow and coolant"


def list_gpus(host: str, gpus: Sequence[Gpu], report: GpuReport) -> tuple[Device, ...]:
    """Return a device for each GPU, with the faults that its driver reports.

    The rates of the devices are still empty, because ``add_run`` adds them. ``gpus`` are the GPUs
    of this host as NVML reported them before the measurement, in the order of the ranks that
    measure them. ``report`` is NVML's report after the measurement. A GPU has a further fault if
    heat lowered its clocks in between, or if it does not answer any more.
    """
    gpu_by_uuid = {gpu.uuid: gpu for gpu in report.gpus}
    # Ranks may still use memory after the work. The memory in use before it is not theirs.
    latest_gpus = [
        replace(gpu_by_uuid.get(gpu.uuid, gpu), memory_used_bytes=gpu.memory_used_bytes)
        for gpu in gpus
    ]
    devices = []
    for rank, (earlier, gpu) in enumerate(zip(gpus, latest_gpus, strict=True)):
        reasons = find_faults(gpu, [peer for peer in latest_gpus if peer.name == gpu.name])
        heat_seconds = (gpu.heat_seconds or 0.0) - (earlier.heat_seconds or 0.0)
        if heat_seconds > 0:
            text = f"clocks: heat lowered them for {heat_seconds:.1f} s of the check"
            reasons = (*reasons, Fault(text=text, fix=_HEAT_FIX))
        if report.failure and gpu.uuid not in gpu_by_uuid:
            text = f"does not answer any more: {report.failure}"
            reasons = (*reasons, Fault(text=text, fix=GPU_FIX))
        devices.append(
            Device(
                host=host,
                name=f"GPU {gpu.index}",
                uuid=gpu.uuid or "",
                kind=gpu.name or "GPU",
                rank=rank,
                reasons=reasons,
            )
        )
    return tuple(devices)


def find_faults(gpu: Gpu, peers: Sequence[Gpu]) -> tuple[Fault, ...]:
    """Return a fault for each state of a GPU that disturbs, such as low clocks or few NVLinks.

    ``peers`` are the GPUs of the same model on the host, including ``gpu``, which should have
    equally many NVLinks. A fault is bad if it concerns memory errors, PCIe, NVLink or a slowdown by
    the hardware.
    """
    is_halted = any(reason.startswith("hardware") for reason in gpu.slowed_by or ())
    bad_topics = (*_BAD_TOPICS, "clocks") if is_halted else _BAD_TOPICS
    return tuple(
        Fault(
            text=f"{finding.topic}: {finding.facts}",
            fix=finding.fix,
            is_bad=finding.topic in bad_topics,
        )
        for finding in examine_gpu(gpu, peers)
        if finding.disturbs
    )
