"""The driver's facts about each GPU before, during and after its work, and its faults."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import IO, Any

import msgspec

from parbench.bench.check.health import Reason
from parbench.bench.machine.gpu import (
    IDLE,
    POWER_CAP,
    Gpu,
    GpuReport,
    abandon,
    nvml_command,
    read_report,
)
from parbench.bench.machine.gpu_topics import FIXES, UNKNOWN, list_gpu_topics, list_slowdowns
from parbench.bench.machine.silent_gpus import suggest_fix

_END_SECONDS = 10.0
_BAD_TOPICS = ("gpu memory", "gpu pcie", "gpu nvlink")
# An increase of these counters of NVLink is a fault, or should be watched. All other counters have
# no verdict, such as codewords without errors (FEC errors - 0), corrected bits (raw errors lane 0)
# and successful recoveries.
_BAD_COUNTER = re.compile(r"link recovery failed events|effective errors|(replay|recovery) errors")
_WATCHED_COUNTER = re.compile(
    r"symbol errors|.*\bcrc\b.*|(malformed packet|buffer overrun|rx remote)( errors)?|fec errors - ([89]|1\d)"
)
_MAXIMA = (
    "sm_clock",
    "memory_clock",
    "utilization_percent",
    "temperature_celsius",
    "pcie_generation",
    "pcie_width",
)


class Watch(AbstractContextManager["Watch"]):
    """Samples the GPUs every second while a block runs, in a child process that calls NVML."""

    def __init__(self, environ: Mapping[str, str], gpus: Sequence[Gpu]) -> None:
        self._environ = environ
        self._before = tuple(gpus)
        self._after = GpuReport()
        self._samples: list[Gpu] = []
        self._output: IO[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Watch":
        if self._before:
            self._output = tempfile.TemporaryFile()  # A pipe would soon be full.
            self._child = subprocess.Popen(
                nvml_command("watch"),
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is None or self._output is None:
            return
        try:
            self._child.communicate(timeout=_END_SECONDS)  # which closes its input
        except subprocess.TimeoutExpired:
            abandon(self._child)
        with self._output as file:
            file.seek(0)
            self._samples = _read_samples(file)
        self._after = read_report(self._environ)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs with their clocks under load, and with the errors and rows after the work."""
        after = {gpu.uuid: gpu for gpu in self._after.gpus}
        gpus = []
        for gpu in self._before:
            # After the work ranks may still use the GPU. Only the processes before it are not our
            # own.
            latest = msgspec.structs.replace(after.get(gpu.uuid, gpu), processes=gpu.processes)
            gpus.append(summarize_load(latest, self._samples))
        return tuple(gpus)

    def count_link_errors(self, gpu: Gpu) -> dict[str, int]:
        """Return by how much the error counters of a GPU's NVLinks have increased."""
        before = Counter(_find(self._before, gpu).nvlink_errors)
        after = Counter(_find(self._after.gpus, gpu).nvlink_errors)
        return dict(after - before)

    def find_loss(self, gpu: Gpu) -> Reason | None:
        """Return the reason if a GPU does not answer after the work."""
        failure = self._after.failure
        if failure is None or any(answering.uuid == gpu.uuid for answering in self._after.gpus):
            return None
        return Reason(text=f"does not answer any more: {failure.describe()}", remedy=suggest_fix(failure))


def _read_samples(file: IO[bytes]) -> list[Gpu]:
    samples: list[Gpu] = []
    for line in file:
        with suppress(msgspec.DecodeError):  # the last line of a child that was killed
            samples += msgspec.json.decode(line, type=GpuReport).gpus
    return samples


def _find(gpus: Iterable[Gpu], gpu: Gpu) -> Gpu:
    return next((other for other in gpus if other.uuid == gpu.uuid), Gpu())


def summarize_load(gpu: Gpu, samples: Iterable[Gpu]) -> Gpu:
    """Return a GPU with the maxima of its busy samples, and with all reasons that slowed it."""
    busy = [sample for sample in samples if sample.uuid == gpu.uuid and (sample.utilization_percent or 0) > 0]
    if not busy:
        return gpu
    fields: dict[str, Any] = {}
    for name in _MAXIMA:
        values = [value for value in (getattr(sample, name) for sample in busy) if value is not None]
        if values:
            fields[name] = max(values)
    reasons = [reason for sample in busy for reason in sample.slowed_by or () if reason != IDLE]
    return msgspec.structs.replace(gpu, slowed_by=tuple(dict.fromkeys(reasons)), **fields)


def format_facts(gpu: Gpu, peers: Sequence[Gpu], link_errors: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return facts about a GPU by topic, ``-`` where unknown, with new errors of its NVLinks."""
    facts = {topic.short_name: topic.describe(gpu) or UNKNOWN for topic in list_gpu_topics(peers)}
    if link_errors:
        facts["nvlink counters"] = ", ".join(f"{name} +{count}" for name, count in link_errors.items())
    return facts


def find_faults(gpu: Gpu, peers: Sequence[Gpu], link_errors: Mapping[str, int]) -> tuple[Reason, ...]:
    """Return the faults of a GPU with their fixes."""
    faults = []
    for topic in list_gpu_topics(peers):
        is_clocks = topic.name == "gpu clocks"
        if topic.is_disturbing(gpu) and not (is_clocks and _has_only_power_cap(gpu)):
            is_halted = is_clocks and any(reason.startswith("hardware") for reason in list_slowdowns(gpu))
            text = f"{topic.short_name}: {topic.describe(gpu)}"
            is_bad = topic.name in _BAD_TOPICS or is_halted
            faults.append(Reason(text=text, remedy=FIXES[topic.name], is_bad=is_bad))
    for name, count in link_errors.items():
        is_bad = _BAD_COUNTER.fullmatch(name) is not None
        if is_bad or _WATCHED_COUNTER.fullmatch(name):
            text = f"NVLink: {count} more {name} meanwhile"
            faults.append(Reason(text=text, remedy=FIXES["gpu nvlink"], is_bad=is_bad))
    return tuple(faults)


def _has_only_power_cap(gpu: Gpu) -> bool:
    """Return whether only the power cap slows a GPU, as it does in matrix products."""
    return set(list_slowdowns(gpu)) == {POWER_CAP}
