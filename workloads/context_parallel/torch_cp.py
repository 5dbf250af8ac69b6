"""torch's own context parallelism, a ring over zigzag parts: the row to compare ours with. CUDA alone.

Its dispatcher is turned on for DTensors, so that other attention in the process stays what it is. The names are torch's
experimental ones, and private.
"""

import importlib
from types import ModuleType

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from workloads.model.transformer import attend

_SEQUENCE = Shard(2)


class TorchContextParallel:
    """The core of an attention of q, k, v (b, a, s/c, d), zigzag parts of the sequence; ``close`` turns torch's off."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("cp",))
        self._torch = _experimental()
        self._torch._enable_context_parallel_dispatcher()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries over all ranks' keys."""
        sharded = [DTensor.from_local(x.contiguous(), self._mesh, [_SEQUENCE], run_check=False) for x in (q, k, v)]
        out = attend(*sharded)
        assert isinstance(out, DTensor)
        local: Tensor = out.to_local()
        return local

    def close(self) -> None:
        """Let DTensors attend as they did before."""
        self._torch._disable_context_parallel_dispatcher()


def _experimental() -> ModuleType:
    return importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
