"""The setting: what is chosen by itself, what may be asked for, what is refused and in which words."""

import dataclasses

import pytest

from bench.cases import Setting
from bench.errors import UserError
from bench.machine import Gpu, Machine
from bench.setting import FUNCTIONAL_ONLY, Chosen, choose_setting

GIB = 1 << 30
CPU = Machine(cores=4, physical_cores=4, memory_bytes=16 * GIB, torch_version="2.13.0+cpu", torch_has_cuda=False)


def with_gpus(*gibibytes: int | None, has_cuda: bool | None = True) -> Machine:
    gpus = tuple(Gpu(name="NVIDIA H100", memory_bytes=None if size is None else size * GIB) for size in gibibytes)
    return dataclasses.replace(CPU, gpus=gpus, torch_version="2.13.0", torch_has_cuda=has_cuda)


def choose(
    machine: Machine,
    *,
    nproc: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    allow_single: bool = False,
) -> Chosen:
    return choose_setting(machine, nproc=nproc, backend=backend, device=device, allow_single=allow_single)


def refusal(
    machine: Machine,
    *,
    nproc: int | None = None,
    backend: str | None = None,
    device: str | None = None,
    allow_single: bool = False,
) -> str:
    with pytest.raises(UserError) as caught:
        choose_setting(machine, nproc=nproc, backend=backend, device=device, allow_single=allow_single)
    return str(caught.value)


# --- found by itself ---


def test_without_gpus_gloo_measures_the_cpu() -> None:
    assert choose(CPU) == Chosen(setting=Setting(nproc=4, backend="gloo", device="cpu", rank_bytes=4 * GIB))


def test_two_gpus_are_measured_with_nccl() -> None:
    expected = Setting(nproc=2, backend="nccl", device="cuda", rank_bytes=40 * GIB)
    assert choose(with_gpus(80, 40)) == Chosen(setting=expected)


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 3), (8, 8), (96, 8)])
def test_the_cpu_gets_a_rank_for_each_core_between_two_and_eight(cores: int, ranks: int) -> None:
    assert choose(dataclasses.replace(CPU, cores=cores)).setting.nproc == ranks


def test_all_gpus_are_used_even_above_eight() -> None:
    assert choose(with_gpus(*[80] * 16)).setting.nproc == 16


def test_one_gpu_falls_to_the_cpu_and_says_how_to_measure_it() -> None:
    chosen = choose(with_gpus(80))
    assert (chosen.setting.device, chosen.setting.backend) == ("cpu", "gloo")
    assert chosen.notes == (
        "one GPU found, and a collective needs two ranks: measuring the CPU; "
        "--nproc 1 --allow-single --device cuda measures the GPU alone",
    )


def test_one_gpu_is_measured_alone_where_that_is_meant() -> None:
    chosen = choose(with_gpus(80), nproc=1, allow_single=True)
    assert chosen == Chosen(setting=Setting(nproc=1, backend="nccl", device="cuda", rank_bytes=80 * GIB))


def test_what_the_note_about_one_gpu_proposes_works() -> None:
    chosen = choose(with_gpus(80), nproc=1, allow_single=True, device="cuda")
    assert (chosen.setting.nproc, chosen.setting.device, chosen.notes) == (1, "cuda", ())


def test_allowing_one_rank_does_not_ask_for_it() -> None:
    assert choose(with_gpus(80), allow_single=True).setting.device == "cpu"
    assert choose(CPU, allow_single=True).setting.nproc == 4


def test_gpus_that_torch_cannot_use_are_named() -> None:
    chosen = choose(with_gpus(80, 80, has_cuda=False))
    assert chosen.setting.device == "cpu"
    assert chosen.notes == ("2 GPUs were found, but torch 2.13.0 (without CUDA) is installed: measuring the CPU",)


def test_a_device_that_was_asked_for_needs_no_explanation() -> None:
    assert choose(with_gpus(80), device="cpu").notes == ()
    assert choose(with_gpus(80, has_cuda=False), device="cpu").notes == ()


# --- asked for ---


def test_gloo_may_run_on_gpus() -> None:
    chosen = choose(with_gpus(80, 80), backend="gloo", device="cuda")
    assert chosen == Chosen(setting=Setting(nproc=2, backend="gloo", device="cuda", rank_bytes=80 * GIB))


def test_the_cpu_may_be_asked_for_on_a_machine_with_gpus() -> None:
    chosen = choose(with_gpus(80, 80), device="cpu")
    assert chosen.setting == Setting(nproc=4, backend="gloo", device="cpu", rank_bytes=4 * GIB)


def test_fewer_ranks_than_gpus_may_be_asked_for() -> None:
    assert choose(with_gpus(80, 80, 80, 80), nproc=3).setting.nproc == 3


def test_one_rank_on_the_cpu_may_be_asked_for() -> None:
    assert choose(CPU, nproc=1, allow_single=True).setting.nproc == 1


# --- memory ---


def test_memory_that_a_gpu_does_not_tell_is_unknown() -> None:
    assert choose(with_gpus(80, None)).setting.rank_bytes is None


def test_memory_that_the_system_does_not_tell_is_unknown() -> None:
    assert choose(dataclasses.replace(CPU, memory_bytes=None)).setting.rank_bytes is None


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    chosen = choose(with_gpus(80, 80), nproc=3, backend="gloo", device="cuda")
    assert chosen.setting.rank_bytes == 40 * GIB
    assert chosen.notes == ("functional only: 3 ranks on 2 GPUs; times include waiting for a GPU",)


# --- more ranks than cores ---


def test_more_ranks_than_cores_are_functional_only() -> None:
    chosen = choose(dataclasses.replace(CPU, cores=2), nproc=3)
    assert chosen.setting.nproc == 3
    assert chosen.notes == ("functional only: 3 ranks on 2 cores; times include waiting for a core",)


def test_the_default_on_one_core_is_functional_only() -> None:
    notes = choose(dataclasses.replace(CPU, cores=1)).notes
    assert notes == ("functional only: 2 ranks on 1 core; times include waiting for a core",)


def test_a_rank_for_each_core_is_not_remarked_upon() -> None:
    assert choose(CPU, nproc=4).notes == ()


def test_the_mark_of_functional_only_begins_its_notes() -> None:
    assert choose(CPU, nproc=5).notes[0].startswith(FUNCTIONAL_ONLY)


def test_both_notes_are_given_where_both_hold() -> None:
    notes = choose(with_gpus(80), nproc=5).notes
    assert [note.split(":")[0] for note in notes] == [
        "one GPU found, and a collective needs two ranks",
        FUNCTIONAL_ONLY,
    ]


# --- refused ---


@pytest.mark.parametrize("nproc", [0, -2])
@pytest.mark.parametrize("allow_single", [False, True])
def test_no_ranks_are_refused(nproc: int, allow_single: bool) -> None:
    message = refusal(CPU, nproc=nproc, allow_single=allow_single)
    assert message == f"--nproc {nproc}: at least 2 ranks are needed"


def test_one_rank_is_refused_with_the_reason() -> None:
    assert refusal(CPU, nproc=1) == (
        "--nproc 1: one rank moves nothing, and is the sign that every node ran alone; "
        "use --nproc 2, or --allow-single if one rank is meant"
    )


def test_one_gpu_asked_for_by_name_is_refused_with_ways_out() -> None:
    assert refusal(with_gpus(80), device="cuda") == (
        "--nproc 1 (one GPU was found): one rank moves nothing, and is the sign that every node ran alone; "
        "use --nproc 2 --device cpu, or --allow-single if one rank is meant"
    )


def test_one_rank_of_many_gpus_may_be_two() -> None:
    assert "use --nproc 2, or" in refusal(with_gpus(80, 80), nproc=1)


def test_nccl_is_refused_on_the_cpu() -> None:
    assert refusal(CPU, backend="nccl") == (
        "--backend nccl moves data between GPUs, and these ranks would run on the CPU (no GPU was found, "
        "torch 2.13.0+cpu (without CUDA) is installed); use --backend gloo"
    )
    assert "--backend nccl" in refusal(with_gpus(80, 80), backend="nccl", device="cpu")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (CPU, "no GPU was found, and torch 2.13.0+cpu (without CUDA) is installed; see what nvidia-smi"),
        (with_gpus(), "no GPU was found, and torch 2.13.0 (with CUDA) is installed; see what nvidia-smi"),
        (
            with_gpus(80, has_cuda=False),
            "1 GPU was found, and torch 2.13.0 (without CUDA) is installed; install a CUDA",
        ),
        (with_gpus(80, 80, has_cuda=None), "2 GPUs were found, and torch 2.13.0 (not known to have CUDA) is installed"),
    ],
)
def test_cuda_is_refused_with_what_was_found(machine: Machine, words: str) -> None:
    message = refusal(machine, device="cuda")
    assert message.startswith(f"--device cuda: {words}")
    remedy = "install a CUDA build of torch" if machine.gpus else "see what nvidia-smi and CUDA_VISIBLE_DEVICES say"
    assert message.endswith(f" is installed; {remedy}, or use --device cpu")


def test_more_ranks_than_gpus_are_refused_for_nccl() -> None:
    assert refusal(with_gpus(80, 80), nproc=4) == (
        "--nproc 4: nccl needs a GPU for each rank, and 2 GPUs were found; use --nproc 2 or --backend gloo"
    )
    assert "use --device cpu or --backend gloo" in refusal(with_gpus(80), nproc=2, device="cuda")


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("cdua", "; did you mean 'cuda'?"),
        ("CPU", "; did you mean 'cpu'?"),
        ("cuda:0", "; did you mean 'cuda'?"),
        ("gpu", "; did you mean 'cuda'?"),
        ("GPUs", "; did you mean 'cuda'?"),
        ("tpux", ""),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest(device: str, hint: str) -> None:
    assert refusal(CPU, device=device) == f"--device {device!r} is not known{hint}; allowed: cpu or cuda"


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    message = refusal(CPU, backend="ncl")
    assert message == "--backend 'ncl' is not known; did you mean 'nccl'?; allowed: gloo or nccl"
    assert refusal(CPU, backend="mpi") == "--backend 'mpi' is not known; allowed: gloo or nccl"


def test_an_empty_device_is_refused() -> None:
    assert refusal(CPU, device="") == "--device '' is not known; allowed: cpu or cuda"


def test_an_absent_torch_is_refused_with_how_to_install_it() -> None:
    machine = dataclasses.replace(CPU, torch_version=None, torch_has_cuda=None)
    assert refusal(machine) == (
        "torch is not installed in this Python environment: install it with pip install 'torch>=2.11'"
    )


def test_a_torch_of_unknown_version_can_be_used() -> None:
    machine = dataclasses.replace(with_gpus(80, 80), torch_version=None)
    assert choose(machine).setting.device == "cuda"
    assert "torch of unknown version (with CUDA)" in refusal(machine, backend="nccl", device="cpu")
