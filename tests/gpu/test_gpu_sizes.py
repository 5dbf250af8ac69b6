"""Real sizes on one GPU: weights drawn there, a check without a reference, experts' kernels, caches."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from parbench.bench.operations.collectives import all_gather
from parbench.bench.plan.plan import BEYOND_CACHE
from parbench.bench.rank.runner import refuse_float8
from parbench.bench.text import UserError, parse_size
from parbench.bench.world.torch_compat import profiling, trace_events
from parbench.bench.world.world import World, open_world
from parbench.workloads.data_parallel import fsdp
from parbench.workloads.expert_parallel.moe_layer import kernel_note
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.transformer import build
from parbench.workloads.step.gate import free_bytes
from parbench.workloads.step.layout import whole
from parbench.workloads.step.training_step import SMALL_MODEL
from tests.support.training_steps import DEFINITION_BY_NAME

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SIZE = {
    "shape": "llama3-8b",
    "layers": 3,
    "sequence": 4096,
    "microbatch": 1,
    "precision": "bfloat16",
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """One rank on NCCL."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with open_world("nccl", "cuda", seed=0, timeout_seconds=120.0, store=HashStore()) as world:
        yield world


def test_weights_are_drawn_on_the_device_the_same_each_time_and_sharded(alone: World) -> None:
    shape = SHAPES["small-llama"]
    one, other = (dict(build(shape, 0, GPU).named_parameters()) for _ in range(2))
    step = fsdp.fsdp(alone, **DEFINITION_BY_NAME["fsdp"].whole({"shape": "small-llama"}))
    held = {name: whole(parameter) for name, parameter in step.layout.model.named_parameters()}
    step.close()
    for name, weights in one.items():
        assert weights.device == GPU, name
        assert torch.equal(weights, other[name]), name
        assert torch.equal(weights, held[name]), name
    drawn = one["tokens.weight"].detach()
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(drawn.mean())) < 1e-3


def test_gate_verifies_a_large_step_by_a_small_model(alone: World) -> None:
    params = DEFINITION_BY_NAME["fsdp"].whole(SIZE)
    assert 0 < free_bytes(alone) <= torch.cuda.get_device_properties(GPU).total_memory
    step = fsdp.fsdp(alone, **{**params, "check": "small"})
    step.reset()
    step.step()
    assert step.check() == 0, step.differences()
    assert SMALL_MODEL in step.describe().notes
    step.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_right_with_uneven_and_empty_groups_and_by_the_kernel_that_a_row_names(
    dtype: torch.dtype,
) -> None:
    chance = torch.Generator(GPU).manual_seed(0)
    counts = torch.tensor([0, 200, 1, 0, 55, 0], device=GPU)
    rows = torch.randn(256, 64, device=GPU, dtype=dtype, generator=chance).requires_grad_()
    weights = torch.randn(6, 64, 128, device=GPU, dtype=dtype, generator=chance).requires_grad_()
    ends, upstream = (
        counts.cumsum(0).int(),
        torch.randn(256, 128, device=GPU, dtype=dtype, generator=chance),
    )

    def both(products: torch.Tensor) -> list[torch.Tensor]:
        return [products, *torch.autograd.grad(products, (rows, weights), upstream)]

    found = both(F.grouped_mm(rows, weights, offs=ends))
    parts = zip(torch.split(rows, counts.tolist()), weights, strict=True)
    right = both(torch.cat([part @ weight for part, weight in parts]))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-2, atol=2e-1 if dtype == torch.bfloat16 else 1e-3
        )
    torch.cuda.synchronize()
    with profiling(GPU) as seen:
        F.grouped_mm(rows, weights, offs=ends)
        torch.cuda.synchronize()
    names = [event.name for event in trace_events(seen) if event.device]
    grouped = kernel_note(dtype, torch.cuda.get_device_capability(GPU)).startswith(
        "experts: grouped"
    )
    assert any("DtoH" in name for name in names) is not grouped, names


def test_float8_is_refused_where_nccl_would_and_carried_elsewhere(alone: World) -> None:
    capability = torch.cuda.get_device_capability(GPU)
    if capability < (9, 0):
        with pytest.raises(UserError, match=r"compute capability 9\.0"):
            refuse_float8("float8_e4m3fn", capability)
        return
    operation = all_gather(alone, size_bytes=1 << 20, dtype="float8_e4m3fn")
    operation.reset()
    operation.step()
    torch.cuda.synchronize()
    assert operation.check() == 0


def test_the_largest_size_of_presets_is_8_times_the_last_level_cache() -> None:
    cache = torch.cuda.get_device_properties(GPU).L2_cache_size
    assert max(map(parse_size, BEYOND_CACHE)) >= 8 * cache
