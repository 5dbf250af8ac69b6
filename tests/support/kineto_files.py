"""Small traces as Kineto writes them of NCCL ranks: operators and launches on the host, kernels on streams."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPUTE_STREAM, COMM_STREAM = 7, 20
KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}


class RankFile:
    """One rank's file, drawn in microseconds of its own clock."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str = "node0",
        base_ns: int = 1_700_000_000_000_000_000,
    ):
        self.rank, self.world_size, self.host, self.base_ns = rank, world_size, host, base_ns
        self.events: list[dict[str, Any]] = []
        self._number = 100

    def event(
        self, cat: str, name: str, start: float, stop: float, tid: int = 1, **args: Any
    ) -> None:
        span = {"ts": start, "dur": round(stop - start, 3)}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **span, "args": args}
        )

    def step(self, number: int, start: float, stop: float) -> None:
        """Mark a step, on the host from its start on and on the device where its kernels are."""
        self.event("user_annotation", f"ProfilerStep#{number}", start, stop)
        self.event("gpu_user_annotation", f"ProfilerStep#{number}", start, stop, tid=COMPUTE_STREAM)

    def kernel(
        self, start: float, stop: float, name: str = "sm90_xmma_gemm_bf16", **args: Any
    ) -> None:
        number = self._launched(start - 10, "aten::mm")
        where = {"stream": COMPUTE_STREAM, "device": 0}
        self.event(
            "kernel", name, start, stop, COMPUTE_STREAM, **{"External id": number}, **where, **args
        )

    def collective(
        self,
        op: str,
        start: float,
        stop: float,
        elements: int,
        ranks: Sequence[int],
        *,
        issued: float | None = None,
    ) -> None:
        """Draw a collective of float32: c10d's operator, its metadata and launch on the host, and its kernel."""
        at = start - 20 if issued is None else issued
        number = self._launched(at + 5, f"c10d::{op}_", "record_param_comms")
        share = elements // len(ranks)
        metadata = {
            "Collective name": op,
            "dtype": "Float",
            "In msg nelems": share if op == "_allgather_base" else elements,
            "Out msg nelems": share if op == "_reduce_scatter_base" else elements,
            "Group size": len(ranks),
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(ranks)),
        }
        where = {"External id": number, "correlation": number, "stream": COMM_STREAM, "device": 0}
        self.event("kernel", KERNELS[op], start, stop, COMM_STREAM, **where, **metadata)

    def _launched(self, at: float, *operators: str) -> int:
        self._number += 1
        for deep, name in enumerate(operators):
            self.event(
                "cpu_op", name, at - 5 + deep, at + 5 - deep, **{"External id": self._number}
            )
        self.event("cuda_runtime", "cudaLaunchKernel", at, at + 2, correlation=self._number)
        return self._number

    def text(self) -> str:
        ranks = list(range(self.world_size))
        group = {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "pg_size": self.world_size,
            "ranks": ranks,
        }
        info = {
            "backend": "nccl",
            "rank": self.rank,
            "world_size": self.world_size,
            "pg_config": [group],
        }
        head = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": info,
            "host_name": self.host,
        }
        whole = {
            **head,
            "baseTimeNanoseconds": self.base_ns,
            "traceEvents": self.events,
            "traceName": "x.json",
        }
        return json.dumps(whole, indent=2)

    def write(self, folder: Path, *, zipped: bool = False) -> Path:
        path = folder / f"rank{self.rank}.json{'.gz' if zipped else ''}"
        text = self.text().encode()
        path.write_bytes(gzip.compress(text) if zipped else text)
        return path
