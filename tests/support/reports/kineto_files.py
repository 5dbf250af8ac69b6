"""Small traces in the format that Kineto writes for NCCL ranks."""

import gzip
import json
from pathlib import Path
from typing import Any

COMPUTE_STREAM = 7
COMM_STREAM = 20
KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)",
}


class RankFile:
    """The trace of one rank, in microseconds of its own clock."""

    def __init__(self, rank: int, world_size: int, host: str = "node0") -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.events: list[dict[str, Any]] = []
        self._correlation = 100

    def event(
        self, category: str, name: str, start: float, stop: float, thread: int = 1, **args: Any
    ) -> None:
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "tid": thread,
            "ts": start,
            "dur": round(stop - start, 3),
            "args": args,
        }
        self.events.append(event)

    def step(self, number: int, start: float, stop: float) -> None:
        """Mark a step on the host and on the device."""
        name = f"ProfilerStep#{number}"
        self.event("user_annotation", name, start, stop)
        self.event("gpu_user_annotation", name, start, stop, COMPUTE_STREAM)

    def kernel(self, start: float, stop: float) -> None:
        args = self._launch(start - 10, "aten::mm")
        name = "sm90_xmma_gemm_bf16"
        self.event("kernel", name, start, stop, COMPUTE_STREAM, **args)

    def collective(
        self,
        op: str,
        start: float,
        stop: float,
        elements: int,
        group: str = "default_pg",
    ) -> None:
        """Add a collective of float32 on all ranks: c10d's operator, launch and kernel."""
        args = self._launch(start - 15, f"c10d::{op}_", "record_param_comms")
        args |= {
            "Collective name": op,
            "dtype": "Float",
            "In msg nelems": elements // self.world_size
            if op == "_allgather_base"
            else elements,
            "Out msg nelems": elements,
            "Group size": self.world_size,
            "Process Group Name": "0",
            "Process Group Description": group,
            "Process Group Ranks": str(list(range(self.world_size))),
        }
        self.event("kernel", KERNELS[op], start, stop, COMM_STREAM, **args)

    def _launch(self, time: float, *operators: str) -> dict[str, Any]:
        """Add nested operators with a launch, and return the arguments of its kernel."""
        self._correlation += 1
        external = {"External id": self._correlation}
        for depth, name in enumerate(operators):
            self.event("cpu_op", name, time - 5 + depth, time + 5 - depth, **external)
        launch = {"correlation": self._correlation}
        self.event("cuda_runtime", "cudaLaunchKernel", time, time + 2, **launch)
        return {**external, **launch}

    def text(self) -> str:
        group = {"pg_name": "0", "ranks": list(range(self.world_size))}
        info = {"rank": self.rank, "world_size": self.world_size, "pg_config": [group]}
        document = {
            "schemaVersion": 1,
            "distributedInfo": info,
            "host_name": self.host,
            "traceEvents": self.events,
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
            "traceName": "x.json",
        }
        return json.dumps(document, indent=2)

    def write(self, folder: Path, *, zipped: bool = False) -> Path:
        path = folder / f"rank{self.rank}.json{'.gz' if zipped else ''}"
        content = self.text().encode()
        path.write_bytes(gzip.compress(content) if zipped else content)
        return path
