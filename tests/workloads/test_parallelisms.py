"""Each preset and pairs of axes match one process and send the analytical bytes."""

import gc
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parbench.bench.world.world import World
from parbench.workloads.presets import PRESETS
from parbench.workloads.probes.sent_bytes import record_calls
from tests.support.ranks import Ranks
from tests.support.workloads.training_steps import (
    Params,
    assert_right,
    build_small_step,
    build_trained_step,
)

MODULE = "tests.workloads.test_parallelisms"
BFLOAT16: Params = {"precision": "bfloat16"}
LLAMA: Params = {"recipe": "llama"}
ODD: Params = {"vocabulary": 61}  # FSDP pads the embedding and the head
EXPERTS: Params = {"experts": 4, "ffn": 64}
CAPACITY: Params = {"capacity": 0.75, "shared": 2}
ZB_V: Params = {"schedule": "zb_v", "layers": 4}
SLOW = pytest.mark.full


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "hybrid"])
def test_preset_matches_one_process(two_ranks: Ranks, name: str) -> None:
    assert_right(two_ranks, name, {})


@pytest.mark.parametrize("name", ["hsdp", "tp_fsdp"])
def test_preset_of_two_axes_matches_one_process(four_ranks: Ranks, name: str) -> None:
    assert_right(four_ranks, name, ODD)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name in PRESETS if name not in ("hybrid", "hsdp", "tp_fsdp")]
)
def test_preset_on_four_ranks_matches_one_process(four_ranks: Ranks, name: str) -> None:
    params = {"layers": 4} if name == "pp" else {"kv_heads": 4}
    assert_right(four_ranks, name, {**params, **LLAMA, **BFLOAT16})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ddp", {"bucket_mb": 0.001, **LLAMA, **BFLOAT16}),
        ("ddp", {"reduce_dtype": "bfloat16", "microbatches": 3, "padding": 0.4}),
        ("fsdp", {"reshard": False, "prefetch": "explicit", **ODD}),
        ("zero1", {"bucket_mb": 0.001, "microbatches": 2, **ODD, **BFLOAT16}),
        ("zero1", {"optimizer": "zero_redundancy", **BFLOAT16}),
        ("hybrid", {"mesh": "pp=2", "microbatches": 2, **EXPERTS}),
        pytest.param("ddp", {"no_sync": False, "microbatches": 2}, marks=SLOW),
        pytest.param("fsdp", {"no_sync": False, "microbatches": 2, **BFLOAT16}, marks=SLOW),
        pytest.param("fsdp", {"checkpointing": "full", "reduce_dtype": "bfloat16"}, marks=SLOW),
        pytest.param("ep_step", {"no_sync": False, "microbatches": 2, "ep": 1}, marks=SLOW),
        pytest.param("tp_sp", {"checkpointing": "selective", **LLAMA}, marks=SLOW),
        pytest.param("pp", {"checkpointing": "full", "layers": 4, **BFLOAT16}, marks=SLOW),
    ],
)
def test_option_matches_one_process(two_ranks: Ranks, name: str, params: Params) -> None:
    assert_right(two_ranks, name, params)


@pytest.mark.parametrize(
    ("mesh", "params"),
    [
        ("dp=2,tp=2", ODD),
        pytest.param("fsdp=2,tp=2", {**ODD, "padding": 0.2}, marks=SLOW),
        ("pp=2,dp=2", {**ZB_V, "padding": 0.3}),
        ("cp=2,fsdp=2", {"padding": 0.5}),
        ("fsdp=2,tp=2,ep=4", {**EXPERTS, "padding": 0.3}),
        pytest.param(
            "pp=2,dp=2",
            {"schedule": "gpipe", "layers_per_stage": "1+2", "layers": 3},
            marks=SLOW,
        ),
        pytest.param(
            "pp=2,fsdp=2", {"schedule": "interleaved", "layers": 4, **ODD}, marks=SLOW
        ),
        pytest.param("pp=2,tp=2", {**ZB_V, **ODD}, marks=SLOW),
        pytest.param("cp=2,dp=2", {"cp_method": "ulysses"}, marks=SLOW),
        pytest.param("cp=2,tp=2", {"cp_method": "allgather_kv", **LLAMA}, marks=SLOW),
        pytest.param("cp=2,pp=2", {"schedule": "zb_h1"}, marks=SLOW),
        pytest.param("dp=2,fsdp=2", {**LLAMA, **BFLOAT16}, marks=SLOW),
        pytest.param("dp=4,ep=2", {**EXPERTS, "routing": "zipf"}, marks=SLOW),
        pytest.param("fsdp=4,ep=2", EXPERTS, marks=SLOW),
        pytest.param("dp=2,fsdp=2,ep=2", EXPERTS, marks=SLOW),
        pytest.param("dp=2,tp=2,ep=4", EXPERTS, marks=SLOW),
        pytest.param("dp=2,pp=2,ep=2", EXPERTS, marks=SLOW),
        pytest.param("fsdp=2,cp=2,ep=2", EXPERTS, marks=SLOW),
        pytest.param("tp=2,fsdp=2,etp=2,ep=2", {**EXPERTS, **LLAMA}, marks=SLOW),
        pytest.param("pp=2,tp=2,etp=2", EXPERTS, marks=SLOW),
        pytest.param("dp=2,tp=2,ep=2,etp=2", {**EXPERTS, **CAPACITY}, marks=SLOW),
    ],
)
def test_mesh_matches_one_process(four_ranks: Ranks, mesh: str, params: Params) -> None:
    assert_right(four_ranks, "hybrid", {"mesh": mesh, "kv_heads": 4, **params})


@pytest.mark.full
def test_three_axes_match_one_process() -> None:
    with Ranks(8) as eight_ranks:
        for mesh in ("pp=2,tp=2,dp=2", "pp=2,fsdp=2,tp=2"):
            assert_right(eight_ranks, "hybrid", {"mesh": mesh, "kv_heads": 4})


def list_reductions(world: World, name: str, params: Params) -> list[float]:
    """Return the MiB of each all_reduce of gradients, in order."""
    step = build_trained_step(world, name, **params)
    calls = record_calls(step.step, {"dp": step.mesh.groups["dp"]})
    step.close()
    return [round(call.num_bytes / 2**20, 2) for call in calls if call.axis == "dp"]


def test_ddp_has_buckets_of_torch(two_ranks: Ranks) -> None:
    """The first bucket is closed at 1 MiB, so that it is reduced during backward."""
    shape = {"layers": 4, "hidden": 128, "kv_heads": 4, "vocabulary": 512, "sequence": 64}
    arguments = {"name": "ddp", "params": shape}
    assert two_ranks.call(f"{MODULE}:list_reductions", **arguments) == [[1.01, 2.55]] * 2


def count_unsharded(world: World) -> dict[str, set[str]]:
    """Return the units that are gathered while each module of FSDP runs forward or backward."""
    step = build_small_step(world, "fsdp", {})
    gathered: dict[str, set[str]] = {}

    def record(name: str) -> None:
        units = gathered.setdefault(name, set())
        for path, module in step.model.named_modules():
            own = module.parameters(recurse=False)
            if any(not isinstance(parameter, DTensor) for parameter in own):
                units.add(path.split(".ffn")[0].split(".attention")[0])

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda *_: record(name))
        module.register_full_backward_pre_hook(lambda *_: record(f"{name} backward"))

    for number in step.model.get_submodule("layers").children():
        assert isinstance(number, FSDPModule)
    watch("layers.0", step.model.get_submodule("layers.0.ffn"))
    watch("layers.1", step.model.get_submodule("layers.1.ffn"))
    step.step()
    step.close()
    return gathered


def test_fsdp_gathers_each_unit_alone(two_ranks: Ranks) -> None:
    """The embedding and the head are sharded while layers run, except the head in the last one."""
    for gathered in two_ranks.call(f"{MODULE}:count_unsharded"):
        assert gathered["layers.0"] == {"layers.0"}
        assert gathered["layers.1"] == {"layers.1"}
        for layer in ("layers.0", "layers.1"):
            units = gathered[f"{layer} backward"]
            assert not units & {"token_embedding", "position_embedding", "head", "norm"}


def count_leftovers(world: World, name: str) -> list[tuple[int, int]]:
    """Count threads and tensors after each of three benchmarks; the first may fill caches."""
    counts = []
    for _ in range(3):
        step = build_small_step(world, name, {})
        step.reset()
        step.step()
        world.barrier()
        step.close()
        del step
        gc.collect()
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        num_tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        counts.append((num_threads, num_tensors))
    assert dist.is_initialized()
    return counts


@pytest.mark.parametrize(
    "name",
    [
        "tp_sp",
        *(
            pytest.param(name, marks=SLOW)
            for name in ("zero1", "ep_step", "pp", "cp", "hybrid")
        ),
    ],
)
def test_closed_step_leaves_nothing(two_ranks: Ranks, name: str) -> None:
    for _, second, third in two_ranks.call(f"{MODULE}:count_leftovers", name=name):
        assert third[0] <= second[0]
        assert third[1] <= second[1]
