"""Device, backend and number of ranks are chosen from the machine and the options."""

from dataclasses import replace
from typing import Any

import pytest

from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.world_spec import Joined, WorldSpec, choose_world
from tests.support.refusals import usage_error

GIB = 1 << 30
CPU = Machine(
    cores=4,
    memory_bytes=16 * GIB,
    torch_version="2.13.0+cpu",
    torch_has_cuda=False,
)
GPU = Gpu(name="NVIDIA H100", memory_bytes=80 * GIB)
SMALL_GPU = Gpu(name="NVIDIA H100", memory_bytes=40 * GIB)
ONE_GPU = replace(CPU, gpus=(GPU,), torch_version="2.13.0", torch_has_cuda=True)
TWO_GPUS = replace(ONE_GPU, gpus=(GPU, GPU))
CPU_WORLD = WorldSpec(nproc=4, backend="gloo", device="cpu", rank_bytes=4 * GIB)
GPU_WORLD = WorldSpec(nproc=2, backend="nccl", device="cuda", rank_bytes=80 * GIB)


def choose(machine: Machine, **options: Any) -> WorldSpec:
    defaults = {
        "nproc": None,
        "backend": None,
        "device": None,
        "allow_single": False,
    }
    return choose_world(machine, **{**defaults, **options})


@pytest.mark.parametrize(
    ("machine", "options", "world"),
    [
        (CPU, {}, CPU_WORLD),
        (TWO_GPUS, {}, GPU_WORLD),
        (replace(TWO_GPUS, gpus=(GPU, SMALL_GPU)), {}, replace(GPU_WORLD, rank_bytes=40 * GIB)),
        (replace(TWO_GPUS, gpus=(GPU,) * 16), {}, replace(GPU_WORLD, nproc=16)),
        (TWO_GPUS, {"device": "cpu"}, CPU_WORLD),
        (TWO_GPUS, {"backend": "gloo", "device": "cuda"}, replace(GPU_WORLD, backend="gloo")),
        (ONE_GPU, {"nproc": 1, "allow_single": True}, replace(GPU_WORLD, nproc=1)),
    ],
)
def test_world_follows_machine_and_options(
    machine: Machine, options: dict[str, Any], world: WorldSpec
) -> None:
    assert choose(machine, **options) == world


@pytest.mark.parametrize(
    ("cores", "num_ranks"),
    [
        (1, 2),
        (3, 3),
        (96, 8),
    ],
)
def test_cpu_gets_two_to_eight_ranks(cores: int, num_ranks: int) -> None:
    assert choose(replace(CPU, cores=cores)).nproc == num_ranks


def test_single_rank_on_cpu_may_be_allowed() -> None:
    assert choose(CPU, nproc=1, allow_single=True).nproc == 1


WITHOUT_CUDA = replace(TWO_GPUS, torch_has_cuda=False)


@pytest.mark.parametrize(
    ("machine", "fact"), [(ONE_GPU, "--nproc 1"), (WITHOUT_CUDA, "without CUDA")]
)
def test_unused_gpus_are_noted(machine: Machine, fact: str) -> None:
    world = choose(machine)
    assert world.device == "cpu"
    [note] = world.notes
    assert fact in note


@pytest.mark.parametrize(
    ("machine", "options", "fact"),
    [
        (TWO_GPUS, {"nproc": 3, "backend": "gloo", "device": "cuda"}, "3 ranks on 2 GPUs. "),
        (replace(CPU, cores=1), {}, "oversubscribed: 2 ranks on 1 core. "),
    ],
)
def test_more_ranks_than_devices_are_noted(
    machine: Machine, options: dict[str, Any], fact: str
) -> None:
    assert fact in choose(machine, **options).notes[0]


@pytest.mark.parametrize(
    ("machine", "options", "fact"),
    [
        (CPU, {"nproc": 0}, "--nproc 0"),
        (CPU, {"nproc": 1}, "has 1 rank"),
        (CPU, {"backend": "nccl"}, "--backend gloo"),
        (CPU, {"device": "cuda"}, "0 GPUs found"),
        (TWO_GPUS, {"nproc": 4}, "--nproc 2"),
        (WITHOUT_CUDA, {"device": "cuda"}, "without CUDA"),
        (Machine(cores=4), {}, "pip install"),
    ],
)
def test_impossible_world_is_refused(
    machine: Machine, options: dict[str, Any], fact: str
) -> None:
    assert fact in usage_error(choose, machine, **options)


LOST = "NVML reported 'GPU is lost (GPU 0)'"
ONE_LOST = replace(TWO_GPUS, silent_gpus=("0000:19:00.0",), gpu_failure=LOST)
ALL_LOST = replace(ONE_LOST, gpus=())


@pytest.mark.parametrize(
    ("machine", "facts"),
    [
        (ONE_LOST, ["no answer from GPU 0000:19:00.0", "--device cuda", "--device cpu"]),
        (ALL_LOST, ["0000:19:00.0", "'GPU is lost (GPU 0)'", "dmesg", "--device cpu"]),
    ],
)
def test_silent_gpus_are_refused(machine: Machine, facts: list[str]) -> None:
    message = usage_error(choose, machine)
    for fact in facts:
        assert fact in message


def test_device_that_is_asked_for_is_chosen_despite_silent_gpus() -> None:
    assert choose(ALL_LOST, device="cpu") == CPU_WORLD
    world = choose(ONE_LOST, device="cuda")
    assert world.nproc == 2
    assert "no answer from GPU 0000:19:00.0" in world.notes[0]
    message = usage_error(choose, ALL_LOST, device="cuda")
    assert "no answer from GPU 0000:19:00.0" in message


def test_nccl_ranks_share_gpus_only_on_request() -> None:
    world = choose(replace(ONE_GPU, may_share_gpus=True), nproc=2, device="cuda")
    assert (world.nproc, world.backend, world.rank_bytes) == (2, "nccl", 40 * GIB)
    assert "2 ranks on 1 GPU" in world.notes[0]
    message = usage_error(choose, ONE_GPU, nproc=2, device="cuda")
    assert "set NCCL_MULTI_RANK_GPU_ENABLE=1" in message


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_joined_is_read_from_variables() -> None:
    assert Joined.find(TORCHRUN) == Joined(
        rank=5,
        size=8,
        local_size=2,
    )
    one_node = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}
    assert Joined.find(one_node) == Joined(
        rank=1,
        size=2,
        local_size=2,
    )
    assert Joined.find({"WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "zero"),
        ("WORLD_SIZE", ""),
        ("MASTER_PORT", None),
    ],
)
def test_joined_refuses_invalid_variables(name: str, value: str | None) -> None:
    variables = {**TORCHRUN, name: value}
    if value is None:
        del variables[name]
    assert name in usage_error(Joined.find, variables)
