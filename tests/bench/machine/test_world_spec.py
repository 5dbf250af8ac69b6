"""The world: what is chosen by itself, what may be asked for, what is refused and in which words."""

from dataclasses import replace

from parbench.bench.machine.gpu import Gpu
from parbench.bench.machine.machine import Machine
from parbench.bench.machine.world_spec import FUNCTIONAL_ONLY, WorldSpec, choose_world
from tests.support.refusals import usage_error

GIB = 1 << 30
CPU = Machine(
    cores=4,
    physical_cores=4,
    memory_bytes=16 * GIB,
    torch_version="2.13.0+cpu",
    torch_has_cuda=False,
)


def with_gpus(*gibibytes: int | None, has_cuda: bool | None = True) -> Machine:
    gpus = tuple(
        Gpu(name="NVIDIA H100", memory_bytes=None if size is None else size * GIB)
        for size in gibibytes
    )
    return replace(CPU, gpus=gpus, torch_version="2.13.0", torch_has_cuda=has_cuda)


def choose(
    machine: Machine,
    *,
    nproc: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    allow_single: bool = False,
) -> WorldSpec:
    return choose_world(
        machine, nproc=nproc, backend=backend, device=device, allow_single=allow_single
    )


def on_cpu(nproc: int = 4, gibibytes: int = 4) -> WorldSpec:
    return WorldSpec(nproc=nproc, backend="gloo", device="cpu", rank_bytes=gibibytes * GIB)


def on_gpus(nproc: int = 2, gibibytes: int = 80, backend: str = "nccl") -> WorldSpec:
    return WorldSpec(nproc=nproc, backend=backend, device="cuda", rank_bytes=gibibytes * GIB)


def test_gpus_are_measured_with_nccl_and_else_the_cpu_with_gloo() -> None:
    assert choose(CPU) == on_cpu()
    assert choose(with_gpus(80, 40)) == on_gpus(gibibytes=40)
    assert choose(with_gpus(*[80] * 16)).nproc == 16, "all GPUs, even above eight"


def test_the_cpu_gets_a_rank_for_each_core_between_two_and_eight() -> None:
    for cores, ranks in ((1, 2), (2, 2), (3, 3), (8, 8), (96, 8)):
        assert choose(replace(CPU, cores=cores)).nproc == ranks, cores


def test_one_gpu_falls_to_the_cpu_and_says_how_to_measure_it() -> None:
    note = (
        "one GPU found, and a collective needs two ranks: measuring the CPU; "
        "--nproc 1 --allow-single --device cuda measures the GPU alone"
    )
    assert choose(with_gpus(80)) == replace(on_cpu(), notes=(note,))
    for device in (None, "cuda"):
        assert choose(with_gpus(80), nproc=1, allow_single=True, device=device) == on_gpus(nproc=1)


def test_allowing_one_rank_does_not_ask_for_it() -> None:
    assert choose(with_gpus(80), allow_single=True).device == "cpu"
    assert choose(CPU, allow_single=True).nproc == 4
    assert choose(CPU, nproc=1, allow_single=True).nproc == 1


def test_gpus_that_torch_cannot_use_are_named_unless_the_cpu_was_asked_for() -> None:
    note = "2 GPUs were found, but torch 2.13.0 (without CUDA) is installed: measuring the CPU"
    assert choose(with_gpus(80, 80, has_cuda=False)) == replace(on_cpu(), notes=(note,))
    for machine in (with_gpus(80), with_gpus(80, has_cuda=False), with_gpus(80, 80)):
        assert choose(machine, device="cpu") == on_cpu()


def test_gloo_on_gpus_and_fewer_ranks_than_gpus_may_be_asked_for() -> None:
    assert choose(with_gpus(80, 80), backend="gloo", device="cuda") == on_gpus(backend="gloo")
    assert choose(with_gpus(80, 80, 80, 80), nproc=3).nproc == 3


def test_ranks_that_share_a_gpu_or_a_core_are_functional_only() -> None:
    chosen = choose(with_gpus(80, 80), nproc=3, backend="gloo", device="cuda")
    assert chosen.rank_bytes == 40 * GIB, "they share its memory"
    assert chosen.notes == ("functional only: 3 ranks on 2 GPUs; times include waiting for a GPU",)
    chosen = choose(replace(CPU, cores=2), nproc=3)
    assert chosen.nproc == 3
    assert chosen.notes == (
        "functional only: 3 ranks on 2 cores; times include waiting for a core",
    )
    default = choose(replace(CPU, cores=1))
    assert default.notes == (
        "functional only: 2 ranks on 1 core; times include waiting for a core",
    )
    assert choose(CPU, nproc=4).notes == ()
    both = [note.split(":")[0] for note in choose(with_gpus(80), nproc=5).notes]
    assert both == ["one GPU found, and a collective needs two ranks", FUNCTIONAL_ONLY]


# --- refused ---


def test_too_few_ranks_are_refused_with_the_reason_and_ways_out() -> None:
    for nproc in (0, -2):
        for allow_single in (False, True):
            told = usage_error(choose, CPU, nproc=nproc, allow_single=allow_single)
            assert told == f"--nproc {nproc}: at least 2 ranks are needed"
    alone = "needs at least 2 ranks; did each node start alone? use --nproc 2"
    assert (
        usage_error(choose, CPU, nproc=1)
        == f"--nproc 1: {alone}, or --allow-single if one rank is meant"
    )
    assert usage_error(choose, with_gpus(80), device="cuda") == (
        f"--nproc 1 (one GPU was found): {alone} --device cpu, or --allow-single if one rank is meant"
    )
    assert "use --nproc 2, or" in usage_error(choose, with_gpus(80, 80), nproc=1)


def test_nccl_is_refused_on_the_cpu_and_for_more_ranks_than_gpus() -> None:
    assert usage_error(choose, CPU, backend="nccl") == (
        "--backend nccl moves data between GPUs, and these ranks would run on the CPU (no GPU was found, "
        "torch 2.13.0+cpu (without CUDA) is installed); use --backend gloo"
    )
    assert "--backend nccl" in usage_error(choose, with_gpus(80, 80), backend="nccl", device="cpu")
    assert usage_error(choose, with_gpus(80, 80), nproc=4) == (
        "--nproc 4: nccl needs a GPU for each rank, and 2 GPUs were found; use --nproc 2 or --backend gloo"
    )
    assert "use --device cpu or --backend gloo" in usage_error(
        choose, with_gpus(80), nproc=2, device="cuda"
    )


def test_cuda_is_refused_with_what_was_found() -> None:
    look, install = (
        "see what nvidia-smi and CUDA_VISIBLE_DEVICES say",
        "install a CUDA build of torch",
    )
    found = [
        (CPU, "no GPU was found, and torch 2.13.0+cpu (without CUDA)", look),
        (with_gpus(), "no GPU was found, and torch 2.13.0 (with CUDA)", look),
        (
            with_gpus(80, has_cuda=False),
            "1 GPU was found, and torch 2.13.0 (without CUDA)",
            install,
        ),
        (
            with_gpus(80, 80, has_cuda=None),
            "2 GPUs were found, and torch 2.13.0 (not known to have CUDA)",
            install,
        ),
    ]
    for machine, words, remedy in found:
        told = usage_error(choose, machine, device="cuda")
        assert told == f"--device cuda: {words} is installed; {remedy}, or use --device cpu"


def test_an_unknown_device_or_backend_is_refused_with_the_nearest() -> None:
    cuda, cpu = "; did you mean 'cuda'?", "; did you mean 'cpu'?"
    hints = {
        "cdua": cuda,
        "CPU": cpu,
        "cuda:0": cuda,
        "gpu": cuda,
        "GPUs": cuda,
        "tpux": "",
        "": "",
    }
    for device, hint in hints.items():
        told = usage_error(choose, CPU, device=device)
        assert told == f"--device {device!r} is not known{hint}; allowed: cpu or cuda"
    for backend, hint in {"ncl": "; did you mean 'nccl'?", "mpi": ""}.items():
        told = usage_error(choose, CPU, backend=backend)
        assert told == f"--backend {backend!r} is not known{hint}; allowed: gloo or nccl"


def test_an_absent_torch_is_refused_with_how_to_install_it_and_one_of_unknown_version_can_be_used() -> (
    None
):
    assert usage_error(choose, replace(CPU, torch_version=None, torch_has_cuda=None)) == (
        "torch is not installed in this Python environment: install it with pip install 'torch>=2.11'"
    )
    machine = replace(with_gpus(80, 80), torch_version=None)
    assert choose(machine).device == "cuda"
    assert "torch of unknown version (with CUDA)" in usage_error(
        choose, machine, backend="nccl", device="cpu"
    )
