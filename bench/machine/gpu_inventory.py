"""The GPUs of all hosts of a run. A rank sends the UUID of its GPU, and each host one report."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from parbench.bench.machine.environment import VOLATILE
from parbench.bench.machine.gpu import Gpu, GpuReport, read_report

# 1: the first rank of each host sends a report of the host's GPUs.
REPORT_VARIABLE = "PARBENCH_GPU_REPORT"
_REPORT = "gpu_report"  # its key in the environment that a rank sends


def capture_gpu(environ: Mapping[str, str], uuid: str, *, has_report: bool) -> dict[str, Any]:
    """Return the GPU's part of a rank's environment.

    With ``has_report``, the first rank of a host adds the report of all GPUs of the host.
    """
    captured: dict[str, Any] = {"gpu": {"uuid": uuid}}
    if has_report and environ.get("LOCAL_RANK", "0") == "0":
        captured[_REPORT] = msgspec.to_builtins(read_report(environ))
    return captured


class GpuInventory:
    """Collects the facts about the GPUs of all hosts by UUID, and the connection of each pair."""

    def __init__(self, report: GpuReport) -> None:
        """Start with the GPUs of the host on which the driver of the run is."""
        self._gpus: dict[str | None, Gpu] = {}
        self.links: dict[frozenset[str], str] = {}
        self._add(report)

    def _add(self, report: GpuReport) -> None:
        """Add the GPUs of a host's report and their connections."""
        self._gpus |= {gpu.uuid: gpu for gpu in report.gpus}
        self.links |= report.get_links_by_pair()
        # In some racks, NVLink also connects the GPUs of different hosts.
        for gpu in report.gpus:
            for uuid, known_gpu in self._gpus.items():
                is_linked = gpu.nvlink_domain and gpu.nvlink_domain == known_gpu.nvlink_domain
                if is_linked and gpu.uuid and uuid and uuid != gpu.uuid:
                    self.links.setdefault(frozenset((uuid, gpu.uuid)), "NVLink")

    def add_facts(self, environments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the ranks' environments, each with the facts about its GPU.

        The reports of hosts are removed from the environments and added to this inventory.
        """
        rank_environments = [dict(environment) for environment in environments]
        for environment in rank_environments:
            if _REPORT in environment:
                report = msgspec.convert(environment.pop(_REPORT), GpuReport)
                # Ranks of the run may already use their GPUs, so other processes are not known.
                gpus = tuple(replace(gpu, processes=None) for gpu in report.gpus)
                self._add(replace(report, gpus=gpus))
        for environment in rank_environments:
            sent_facts = environment.get("gpu", {})
            gpu = self._gpus.get(sent_facts.get("uuid"))
            if sent_facts and gpu is not None:
                environment["gpu"] = {**gpu.facts(varying=False), **sent_facts}
                load = environment.get(VOLATILE, {})
                environment[VOLATILE] = {**load, "gpu": gpu.facts(varying=True)}
        return rank_environments
