"""Where to measure: the number of ranks, the backend and the device, from what was asked and what was found."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parbench.bench.machine.machine import SHARING_VARIABLE, Machine
from parbench.bench.machine.silent_gpus import describe_silent_gpus, suggest_fix
from parbench.bench.text import UserError, counted, did_you_mean, listed

DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")
_MOST_RANKS = 1 << 12
_SHARING_NCCL = (2, 30)  # the first version with NCCL_MULTI_RANK_GPU_ENABLE


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """Where cases are to run, as far as it is known before any rank starts."""

    nproc: int
    backend: str
    device: str
    rank_bytes: int | None = None  # the memory that one rank can have, None if unknown
    nodes: int = 1
    distribution: str = "block"
    sharing: str = ""  # how many ranks share a core or a GPU, if any do
    notes: tuple[str, ...] = ()  # what else numbers of it will not show

    @property
    def gloo_on_gpus(self) -> bool:
        """Whether gloo is to carry CUDA tensors, which in torch it does in plain collectives alone."""
        return (self.backend, self.device) == ("gloo", "cuda")

    @property
    def hosts(self) -> list[str]:
        """A name for each rank's node, taking nodes to hold equally many."""
        each = -(-self.nproc // self.nodes)
        cyclic = self.distribution == "cyclic"
        return [str(rank % self.nodes if cyclic else rank // each) for rank in range(self.nproc)]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The ranks that another launcher started: this one, how many there are, and how many are on this node."""

    rank: int
    size: int
    local_size: int
    one_node: bool  # known to share a node; without LOCAL_WORLD_SIZE they may not

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Joined | None":
        """Return where this process stands among ranks that are there already, None if it was started alone."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            told = "RANK and WORLD_SIZE are set, so ranks are there already"
            raise UserError(f"{told}; set MASTER_ADDR and MASTER_PORT too")
        try:
            rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            raise UserError("RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are whole numbers where they are set") from None
        one_node = "LOCAL_WORLD_SIZE" in environ and local_size == size
        return Joined(rank=rank, size=size, local_size=local_size, one_node=one_node)


def choose_world(
    machine: Machine,
    *,
    nproc: int | None,
    backend: str | None,
    device: str | None,
    allow_single: bool,
    one_gpu_options: str = "--nproc 1 --allow-single --device cuda",
) -> WorldSpec:
    """Return the world for what was asked, None meaning the default; ``UserError`` if it cannot run here.

    ``one_gpu_options`` are those that measure a GPU which is the only one of its node.
    """
    if machine.torch_version is None and machine.torch_has_cuda is None:
        raise UserError("torch is not installed in this Python environment: install it with pip install 'torch>=2.11'")
    check_known("--device", device, DEVICES)
    check_known("--backend", backend, BACKENDS)
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 2 ranks are needed")
    if nproc is not None and nproc > _MOST_RANKS:
        raise UserError(f"--nproc {nproc}: a node has at most {_MOST_RANKS} ranks")
    silent = find_silence(machine)
    if silent and device is None:
        raise UserError(f"{silent}; {_suggest_device(machine)}")
    needed = 1 if nproc == 1 and allow_single else 2
    where = device or ("cuda" if machine.torch_has_cuda and len(machine.gpus) >= needed else "cpu")
    means = backend or ("nccl" if where == "cuda" else "gloo")
    ranks = nproc or (len(machine.gpus) if where == "cuda" else max(2, min(8, machine.cores)))
    _refuse(machine, ranks, means, where, allow_single=allow_single)
    memories = [machine.memory_bytes] if where == "cpu" else [gpu.memory_bytes for gpu in machine.gpus]
    known = [memory for memory in memories if memory is not None]
    each = min(known) // math.ceil(ranks / len(memories)) if len(known) == len(memories) else None
    notes: tuple[str, ...] = ()
    if device is None and where == "cpu" and machine.gpus:
        found, torch = _found(machine)
        why = "one GPU found, and a collective needs two ranks" if machine.torch_has_cuda else f"{found}, but {torch}"
        how = f"; {one_gpu_options} measures the GPU alone" if machine.torch_has_cuda else ""
        notes = (f"{why}: measuring the CPU{how}", *notes)
    if silent and where == "cuda":
        notes = (silent, *notes)
    return WorldSpec(
        nproc=ranks,
        backend=means,
        device=where,
        rank_bytes=each,
        sharing=describe_sharing(machine, ranks, where),
        notes=notes,
    )


def find_silence(machine: Machine) -> str:
    """Return which GPUs do not answer and what to do, empty where all answer."""
    if not machine.silent_gpus:
        return ""
    return f"{describe_silent_gpus(machine.silent_gpus, machine.gpu_failure)}; {suggest_fix(machine.gpu_failure)}"


def find_old_driver(machine: Machine) -> str:
    """Return why torch cannot use these GPUs, empty unless their driver is older than the CUDA of torch.

    Within a major version of CUDA an older driver will do (CUDA Compatibility, "Minor Version Compatibility").
    """
    supported, built = machine.driver_cuda_version, machine.torch_cuda_version
    if supported is None or built is None or _major(supported) >= _major(built):
        return ""
    driver = next((gpu.driver for gpu in machine.gpus if gpu.driver), "of unknown version")
    torch = f"torch {machine.torch_version} is built for CUDA {built}"
    return f"driver {driver} supports CUDA up to {supported}, and {torch}"


def suggest_driver(machine: Machine) -> str:
    """Return what makes torch work with these GPUs, where their driver is too old."""
    major = _major(machine.driver_cuda_version or "")
    return (
        f"install a build of torch for CUDA {major} (https://pytorch.org/get-started/locally), a newer driver, "
        "or NVIDIA's cuda-compat package"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def _suggest_device(machine: Machine) -> str:
    answering = len(machine.gpus)
    cuda = f"--device cuda measures the GPUs that answer ({answering}), " if answering else ""
    return f"{cuda}--device cpu measures the cores"


def describe_sharing(machine: Machine, ranks: int, device: str) -> str:
    """Return a note if ranks share cores or GPUs, otherwise an empty string."""
    available, noun = (machine.cores, "core") if device == "cpu" else (len(machine.gpus), "GPU")
    if ranks <= available:
        return ""
    shared = f"{counted(ranks, 'rank')} on {counted(available, noun)}"
    return f"functional only: {shared}; times include waiting for a {noun}"


def check_known(option: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        # the nearest spelling of gpu would be cpu, its opposite
        meant = "cuda" if given.lower().startswith("gpu") and "cuda" in allowed else given.lower()
        raise UserError(f"{option} {given!r} is not known{did_you_mean(meant, allowed)}; allowed: {listed(allowed)}")


def _refuse(machine: Machine, ranks: int, backend: str, device: str, *, allow_single: bool) -> None:
    gpus, (found, torch) = len(machine.gpus), _found(machine)
    if device == "cuda" and not gpus and (silent := find_silence(machine)):
        raise UserError(f"--device cuda: {silent}; --device cpu measures the cores")
    if device == "cuda" and not (gpus and machine.torch_has_cuda):
        remedy = "install a CUDA build of torch" if gpus else "see what nvidia-smi and CUDA_VISIBLE_DEVICES say"
        raise UserError(f"--device cuda: {found}, and {torch}; {remedy}, or use --device cpu")
    if device == "cuda" and (old_driver := find_old_driver(machine)):
        raise UserError(f"{old_driver}: {suggest_driver(machine)}; --device cpu measures the cores")
    if backend == "nccl" and device == "cpu":
        told = "--backend nccl moves data between GPUs, and these ranks would run on the CPU"
        raise UserError(f"{told} ({found}, {torch}); use --backend gloo")
    if ranks == 1 and not allow_single:
        one, cpu = (" (one GPU was found)", " --device cpu") if device == "cuda" and gpus == 1 else ("", "")
        remedy = f"use --nproc 2{cpu}, or --allow-single if one rank is meant"
        raise UserError(f"--nproc 1{one}: needs at least 2 ranks; did each node start alone? {remedy}")
    if backend == "nccl" and ranks > gpus:
        _check_sharing(machine, ranks)


def _check_sharing(machine: Machine, ranks: int) -> None:
    """Refuse more NCCL ranks than GPUs, unless NCCL is set to accept them."""
    known = re.match(r"(\d+)\.(\d+)", machine.nccl_version or "")
    is_old = known is not None and (int(known[1]), int(known[2])) < _SHARING_NCCL
    if machine.may_share_gpus and not is_old:
        return
    gpus, (found, _) = len(machine.gpus), _found(machine)
    fewer = f"--nproc {gpus}" if gpus > 1 else "--device cpu"
    first = ".".join(map(str, _SHARING_NCCL))
    sharing = f"set {SHARING_VARIABLE}=1 (NCCL {first} or newer) to test functions only"
    if machine.may_share_gpus:
        sharing = f"install NCCL {first}, because {SHARING_VARIABLE} has no effect in NCCL {machine.nccl_version}"
    refusal = f"--nproc {ranks}: nccl needs a GPU for each rank, and {found}"
    raise UserError(f"{refusal}; use {fewer} or --backend gloo, or {sharing}")


def _found(machine: Machine) -> tuple[str, str]:
    number = len(machine.gpus)
    builds = {True: "with CUDA", False: "without CUDA", None: "not known to have CUDA"}
    torch = f"torch {machine.torch_version or 'of unknown version'} ({builds[machine.torch_has_cuda]}) is installed"
    return f"{number or 'no'} {'GPU was' if number < 2 else 'GPUs were'} found", torch
