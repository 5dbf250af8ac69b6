"""Real sizes on one GPU: initialization, the check by a small model, kernels, caches."""

import pytest
import torch

from parbench.bench.operations.collectives import all_gather
from parbench.bench.plan.options import BEYOND_CACHE
from parbench.bench.rank.runner import refuse_float8
from parbench.bench.text import UserError
from parbench.bench.world.world import World
from parbench.workloads.mesh.mesh import get_full_tensor
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.step.reference_choice import count_free_bytes
from parbench.workloads.step.train_step import SMALL_MODEL_NOTE, fsdp
from tests.support.workloads.training_steps import DEFINITION_BY_NAME, build_model

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
LARGE_STEP = {
    "shape": "llama3-8b",
    "layers": 3,
    "sequence": 4096,
    "microbatch": 1,
    "precision": "bfloat16",
}


def test_initial_weights_are_reproducible() -> None:
    shape = SHAPES["small-llama"]
    first = dict(build_model(shape, 0, GPU).named_parameters())
    second = dict(build_model(shape, 0, GPU).named_parameters())
    for name, weights in first.items():
        assert weights.device == GPU, name
        assert torch.equal(weights, second[name]), name
    embedding = first["token_embedding.weight"].detach()
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(embedding.mean())) < 1e-3


def test_sharded_weights_equal_full_weights(nccl_world: World) -> None:
    expected = dict(build_model(SHAPES["small-llama"], 0, GPU).named_parameters())
    params = DEFINITION_BY_NAME["fsdp"].complete({"shape": "small-llama"})
    step = fsdp(nccl_world, **params)
    for name, parameter in step.model.named_parameters():
        assert torch.equal(get_full_tensor(parameter), expected[name]), name
    step.close()


def test_large_step_is_checked_by_small_model(nccl_world: World) -> None:
    assert (
        0 < count_free_bytes(nccl_world) <= torch.cuda.get_device_properties(GPU).total_memory
    )
    params = DEFINITION_BY_NAME["fsdp"].complete(LARGE_STEP)
    step = fsdp(nccl_world, **{**params, "check": "small"})
    step.reset()
    step.step()
    assert step.check() == 0, step.differences()
    assert SMALL_MODEL_NOTE in step.describe().notes
    step.close()


def test_float8_needs_compute_capability_9(nccl_world: World) -> None:
    capability = torch.cuda.get_device_capability(GPU)
    if capability < (9, 0):
        with pytest.raises(UserError, match=r"compute capability 9\.0"):
            refuse_float8("float8_e4m3fn", capability)
        return
    operation = all_gather(nccl_world, size_bytes=1 << 20, dtype="float8_e4m3fn")
    operation.reset()
    operation.step()
    torch.cuda.synchronize()
    assert operation.check() == 0


def test_largest_preset_size_exceeds_cache() -> None:
    cache_bytes = torch.cuda.get_device_properties(GPU).L2_cache_size
    assert max(BEYOND_CACHE) >= 8 * cache_bytes
