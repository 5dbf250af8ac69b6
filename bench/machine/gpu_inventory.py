"""The GPUs of all hosts of a run. A rank sends the UUID of its GPU, and each host one report."""

from collections.abc import Mapping
from typing import Any

import msgspec

from parbench.bench.machine.environment import VOLATILE
from parbench.bench.machine.gpu import Gpu, GpuReport, read_report

# 1: the first rank of each host sends a report of the host's GPUs.
REPORT_VARIABLE = "PARBENCH_GPU_REPORT"
_REPORT = "gpu_report"  # its key in the environment that a rank sends


def capture_gpu(environ: Mapping[str, str], uuid: str, *, has_report: bool) -> dict[str, Any]:
    """Return the part of a rank's environment about its GPU.

    The first rank of a host adds a report if asked to.
    """
    captured: dict[str, Any] = {"gpu": {"uuid": uuid}}
    if has_report and environ.get("LOCAL_RANK", "0") == "0":
        captured[_REPORT] = msgspec.to_builtins(read_report(environ))
    return captured


class GpuInventory:
    """The facts about GPUs by UUID, and how GPUs are connected."""

    def __init__(self, report: GpuReport) -> None:
        """Start with the GPUs of the driver's host."""
        self._gpus: dict[str, Gpu] = {}
        self.links: dict[frozenset[str], str] = {}
        self._add(report)

    def _add(self, report: GpuReport) -> None:
        self._gpus |= {gpu.uuid: gpu for gpu in report.gpus if gpu.uuid is not None}
        self.links |= report.links_by_pair()

    def add_facts(self, environments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the environments of ranks with facts about their GPUs in place of the reports."""
        for environment in environments:
            if _REPORT in environment:
                report = msgspec.convert(environment[_REPORT], GpuReport)
                # Ranks of the run may already use their GPUs, so other processes are not known.
                gpus = tuple(msgspec.structs.replace(gpu, processes=None) for gpu in report.gpus)
                self._add(msgspec.structs.replace(report, gpus=gpus))
        return [self._add_facts_of_rank(environment) for environment in environments]

    def _add_facts_of_rank(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        complete = {name: value for name, value in environment.items() if name != _REPORT}
        gpu = self._gpus.get(environment.get("gpu", {}).get("uuid"))
        if gpu is not None:
            complete["gpu"] = {**gpu.facts(varying=False), **environment["gpu"]}
            complete[VOLATILE] = {**environment.get(VOLATILE, {}), "gpu": gpu.facts(varying=True)}
        return complete
