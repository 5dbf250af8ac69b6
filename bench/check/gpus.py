"""What the driver tells of each GPU before, while and after it works, and what of it makes a GPU bad."""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from parbench.bench.check.health import Reason
from parbench.bench.machine.doctor import REMEDIES, UNKNOWN, gpu_topics, slowing
from parbench.bench.machine.gpu import IDLE, Gpu, by_uuid, gpus_of, in_detail, nvidia_smi

_EVERY_SECONDS = 1.0
_BAD_TOPICS = ("gpu memory", "gpu pcie", "gpu nvlink")
_FINE_UNDER_LOAD = ("software power cap",)  # what a product of matrices runs into, on a GPU that is well
# The counters of NVLink of which an increase is a fault, or is to be watched. All others are not judged, such as
# codewords without errors (FEC errors - 0), corrected bits (raw errors lane 0) and recoveries that succeeded.
_BAD_COUNTER = re.compile(r"link recovery failed events|effective errors|(replay|recovery) errors")
_WATCHED_COUNTER = re.compile(
    r"symbol errors|.*\bcrc\b.*|(malformed packet|buffer overrun|rx remote)( errors)?|fec errors - ([89]|1\d)"
)
Counters = Mapping[str, Mapping[str, int]]  # errors of all NVLinks by the GPU's UUID and the counter's name


class Watch(AbstractContextManager["Watch"]):
    """Looks at the GPUs every second while a block runs."""

    def __init__(self, environ: Mapping[str, str], gpus: Sequence[Gpu]) -> None:
        self._environ, self._gpus = environ, gpus
        self._seen: list[tuple[Gpu, ...]] = []
        self._stop = threading.Event()
        self._before: Counters = {}
        self._after: Counters = {}
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        if self._gpus:
            self._gpus = in_detail(self._environ, self._gpus)  # with the processes that are not our own ranks
            self._before = nvlink_errors(nvidia_smi(self._environ, "nvlink", "--errorcounters"))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._gpus:
            self._thread.join()
            self._after = nvlink_errors(nvidia_smi(self._environ, "nvlink", "--errorcounters"))
            # what work may have changed, but for the processes that were not its own
            after = zip(in_detail(self._environ, self._gpus), self._gpus, strict=True)
            self._gpus = tuple(replace(now, processes=before.processes) for now, before in after)

    def _look(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._seen.append(gpus_of(self._environ))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs as they were at work, None where they were not seen at it."""
        return tuple(at_work(gpu, (one for at_once in self._seen for one in at_once)) for gpu in self._gpus)

    def grown(self, gpu: Gpu) -> dict[str, int]:
        """Return by how much NVLinks' counters of errors have grown."""
        before, after = (Counter(told.get(gpu.uuid or "")) for told in (self._before, self._after))
        return after - before


def at_work(gpu: Gpu, seen: Iterable[Gpu]) -> Gpu:
    """Return a GPU with its highest clocks, most lanes, most heat, and whatever slowed it, of when it was busy."""
    busy = [one for one in seen if one.uuid == gpu.uuid and (one.utilization_percent or 0) > 0]
    if not busy:
        return gpu
    names = ("sm_clock", "memory_clock", "utilization_percent", "temperature_celsius", "pcie_generation", "pcie_width")
    most = {name: [value for one in busy if (value := getattr(one, name)) is not None] for name in names}
    told = dict.fromkeys(reason for one in busy for reason in one.slowed_by or () if reason != IDLE)
    highest = {name: max(values) for name, values in most.items() if values}
    last = {name: getattr(busy[-1], name) for name in ("errors_corrected", "errors_uncorrected")}
    return replace(gpu, slowed_by=tuple(told), **highest, **last)


def nvlink_errors(text: str | None) -> Counters:
    """Return the sums over a GPU's links of each of its counters, by UUID, from ``nvidia-smi nvlink -e``."""
    found = {uuid: Counter[str]() for uuid in by_uuid(text)}
    for uuid, block in by_uuid(text).items():
        for name, count in re.findall(r"Link \d+: (.+?): (\d+)\s*$", block, re.MULTILINE):
            found[uuid][name.lower()] += int(count)
    return found


def facts_of(gpu: Gpu, alike: Sequence[Gpu], grown: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return what is told of a GPU by topic, ``-`` where unknown; ``grown`` are increases of NVLink's counters."""
    facts = {topic.name.removeprefix("gpu "): topic.tell(gpu) or UNKNOWN for topic in gpu_topics(alike)}
    if grown:
        facts["nvlink counters"] = ", ".join(f"{name} +{count}" for name, count in grown.items())
    return facts


def complaints(gpu: Gpu, alike: Sequence[Gpu], grown: Mapping[str, int]) -> tuple[Reason, ...]:
    """Return what is wrong with a GPU, and what to do."""
    found = []
    for topic in gpu_topics(alike):
        if topic.disturbs(gpu):
            reasons = [one for one in slowing(gpu) if one not in _FINE_UNDER_LOAD]
            if topic.name == "gpu clocks" and slowing(gpu) and not reasons:
                continue
            halted = topic.name == "gpu clocks" and any(one.startswith("hardware") for one in reasons)
            words = f"{topic.name.removeprefix('gpu ')}: {topic.tell(gpu)}"
            bad = topic.name in _BAD_TOPICS or halted
            found.append(Reason(text=words, remedy=REMEDIES[topic.name], is_bad=bad))
    for name, count in grown.items():
        is_bad = _BAD_COUNTER.fullmatch(name) is not None
        if is_bad or _WATCHED_COUNTER.fullmatch(name):
            words = f"NVLink: {count} more {name} meanwhile"
            found.append(Reason(text=words, remedy=REMEDIES["gpu nvlink"], is_bad=is_bad))
    return tuple(found)
