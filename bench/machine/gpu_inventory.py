"""The GPUs of all hosts of a run. A rank sends the UUID of its GPU, and each host one report."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from parbench.bench.machine.gpu import Gpu, GpuReport, read_report

_REPORT = "gpu_report"  # its key in the environment that a rank sends
# The fields of a GPU that a run stores: its settings and its hardware, which do not vary.
_RECORDED_FIELDS = (
    "driver",
    "memory_bytes",
    "persistence",
    "mig",
    "ecc",
    "power_limit_watts",
    "sm_clock_max",
    "pcie_generation_max",
    "pcie_width_max",
    "nvlinks",
    "active_nvlinks",
    "nvlink_bytes_per_second",
    "fabric",
)


def capture_gpu(environ: Mapping[str, str], uuid: str) -> dict[str, Any]:
    """Return the facts about GPUs that this rank sends to the process of ``parbench run``.

    The rank sends them as a part of its environment, a dict of facts about its host and software.
    The key ``gpu`` holds a dict with the key ``uuid``, the UUID of the rank's GPU. The key
    ``gpu_report`` holds NVML's report of all GPUs of this host as plain data. It exists only if
    ranks are on several hosts and LOCAL_RANK in ``environ`` is 0. The process of ``parbench run``
    inspects its own host itself.
    """
    captured: dict[str, Any] = {"gpu": {"uuid": uuid}}
    is_one_host = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
    if not is_one_host and environ.get("LOCAL_RANK", "0") == "0":
        captured[_REPORT] = msgspec.to_builtins(read_report(environ))
    return captured


class GpuInventory:
    """Collects NVML's facts about the GPUs of all hosts of a run, and the connections of GPUs.

    It adds to the environment of each rank the facts about the rank's GPU.
    """

    def __init__(self, report: GpuReport) -> None:
        """Start with ``report``, NVML's report of the host on which ``parbench run`` runs."""
        self._gpus: dict[str | None, Gpu] = {}
        """The GPUs of all hosts so far, by UUID."""
        self.links: dict[frozenset[str], str] = {}
        """The connection of two GPUs, such as ``NVLink``, by the pair of their UUIDs."""
        self._add(report)

    def _add(self, report: GpuReport) -> None:
        """Add the GPUs in NVML's report of a host, and their connections."""
        self._gpus |= {gpu.uuid: gpu for gpu in report.gpus}
        self.links |= report.get_links_by_pair()

    def add_facts(self, environments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the ranks' environments with the facts about each rank's GPU added.

        ``environments``, the facts that ranks have sent about their hosts, and the result are in
        rank order. A copy has the facts about the GPU under the key ``gpu``. A rank without a known
        GPU gets no facts. NVML's reports of hosts, which are under the key ``gpu_report``, are
        added to this inventory and removed from the copies.
        """
        rank_environments = [dict(environment) for environment in environments]
        for environment in rank_environments:
            if _REPORT in environment:
                self._add(msgspec.convert(environment.pop(_REPORT), GpuReport))
        for environment in rank_environments:
            sent_facts = environment.get("gpu", {})
            gpu = self._gpus.get(sent_facts.get("uuid"))
            if sent_facts and gpu is not None:
                facts = {name: getattr(gpu, name) for name in _RECORDED_FIELDS}
                environment["gpu"] = {**facts, **sent_facts}
        return rank_environments
