"""torch's own context parallelism is turned on and off again; on CPUs it raises what its refusal says."""

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.tensor import DTensor

from bench.world import World
from workloads.context.torch_cp import TorchContextParallel
from workloads.model import attend

_aten = torch.ops.aten


def turned_on_and_off(world: World) -> tuple[bool, bool, bool, str]:
    """Return whether torch handles attention of DTensors before, between and after, and what it raises between."""

    def handled() -> bool:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        return _aten._scaled_dot_product_flash_attention.default in handlers

    group = dist.new_group()
    before = handled()
    core, told = TorchContextParallel(group, world.device.type), ""
    between, x = handled(), torch.randn(1, 2, 4, 8)
    try:
        core(x, x, x)
    except NotImplementedError as error:
        told = str(error)
    assert torch.isfinite(attend(x, x, x)).all()  # that of plain tensors is left alone
    core.close()
    dist.destroy_process_group(group)
    return before, between, handled(), told


def test_it_is_on_until_it_is_closed_and_not_implemented_on_cpus(two_ranks: Ranks) -> None:
    for before, between, after, told in two_ranks.call("test_torch_cp:turned_on_and_off"):
        assert (before, between, after) == (False, True, False)
        assert "_scaled_dot_product_flash_attention_for_cpu" in told


def attended_on_gpu() -> float:
    """Return how far torch's attention on one GPU is from that of one process."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        group = dist.group.WORLD
        assert group is not None
        x = torch.randn(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
        core = TorchContextParallel(group, "cuda")
        found = core(x, x, x)
        core.close()
        return float((found - attend(x, x, x)).abs().max())
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_on_one_gpu_it_is_attention() -> None:
    assert attended_on_gpu() < 0.02
