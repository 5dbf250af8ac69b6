"""Where to measure: the number of ranks, the backend and the device, from what was asked and what was found."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.machine.machine import Machine
from bench.text import UserError, counted, did_you_mean, listed

DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")
FUNCTIONAL_ONLY = "functional only"
"""How a note begins that says that ranks share what each should have alone."""

_MAX_DEFAULT_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """Where cases are to run, as far as it is known before any rank starts; ``rank_bytes`` is None if unknown.

    ``rank_bytes`` is the memory that one rank can have.
    """

    nproc: int
    backend: str
    device: str
    rank_bytes: int | None = None
    nodes: int = 1
    placement: str = "block"

    @property
    def hosts(self) -> list[str]:
        """A name for each rank's node, as far as it is known before any rank starts: nodes hold equally many."""
        each = -(-self.nproc // self.nodes)
        cyclic = self.placement == "cyclic"
        return [str(rank % self.nodes if cyclic else rank // each) for rank in range(self.nproc)]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The ranks that another launcher started: this one, how many there are, and how many are on this node.

    ``one_node`` is whether they are known to share a node; without LOCAL_WORLD_SIZE they may not.
    """

    rank: int
    size: int
    local_size: int
    one_node: bool

    def spec(self, local: WorldSpec) -> WorldSpec:
        """Return the spec of all ranks from that of this node's."""
        return replace(local, nproc=self.size, nodes=-(-self.size // self.local_size))

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Joined | None":
        """Return where this process stands among ranks that are there already, None if it was started alone."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            raise UserError(
                "RANK and WORLD_SIZE are set, so ranks are there already; set MASTER_ADDR and MASTER_PORT too"
            )
        try:
            rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            raise UserError("RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are whole numbers where they are set") from None
        one_node = "LOCAL_WORLD_SIZE" in environ and local_size == size
        return Joined(rank=rank, size=size, local_size=local_size, one_node=one_node)


@dataclass(frozen=True, kw_only=True)
class WorldChoice:
    """A world to measure in, and in words what its numbers will not show."""

    spec: WorldSpec
    notes: tuple[str, ...] = ()


def choose_world(
    machine: Machine, *, nproc: int | None, backend: str | None, device: str | None, allow_single: bool
) -> WorldChoice:
    """Return the world for what was asked, None meaning the default; ``UserError`` if it cannot run here."""
    if machine.torch_version is None and machine.torch_has_cuda is None:
        raise UserError("torch is not installed in this Python environment: install it with pip install 'torch>=2.11'")
    _check_known("--device", device, DEVICES)
    _check_known("--backend", backend, BACKENDS)
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 2 ranks are needed")
    needed = 1 if nproc == 1 and allow_single else 2
    where = device or ("cuda" if machine.torch_has_cuda and len(machine.gpus) >= needed else "cpu")
    means = backend or ("nccl" if where == "cuda" else "gloo")
    _check_device(machine, where, means)
    default = len(machine.gpus) if where == "cuda" else max(2, min(_MAX_DEFAULT_RANKS, machine.cores))
    ranks = default if nproc is None else nproc
    _check_ranks(machine, ranks, means, where, allow_single=allow_single)
    spec = WorldSpec(nproc=ranks, backend=means, device=where, rank_bytes=_rank_bytes(machine, where, ranks))
    notes = _fallback_notes(machine, where) if device is None else ()
    return WorldChoice(spec=spec, notes=(*notes, *sharing_notes(machine, ranks, where)))


def sharing_notes(machine: Machine, ranks: int, device: str) -> tuple[str, ...]:
    available, noun = (machine.cores, "core") if device == "cpu" else (len(machine.gpus), "GPU")
    if ranks <= available:
        return ()
    shared = f"{counted(ranks, 'rank')} on {counted(available, noun)}"
    return (f"{FUNCTIONAL_ONLY}: {shared}; times include waiting for a {noun}",)


def _check_known(option: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is None or given in allowed:
        return
    # The nearest spelling of gpu would be cpu, its opposite.
    hint = "; did you mean 'cuda'?" if given.lower().startswith("gpu") else did_you_mean(given.lower(), allowed)
    raise UserError(f"{option} {given!r} is not known{hint}; allowed: {listed(allowed)}")


def _check_device(machine: Machine, device: str, backend: str) -> None:
    found = f"{_gpus(machine)} found"
    if device == "cuda" and not (machine.gpus and machine.torch_has_cuda):
        remedy = "install a CUDA build of torch" if machine.gpus else "see what nvidia-smi and CUDA_VISIBLE_DEVICES say"
        raise UserError(f"--device cuda: {found}, and {_torch(machine)} is installed; {remedy}, or use --device cpu")
    if backend == "nccl" and device == "cpu":
        raise UserError(
            f"--backend nccl moves data between GPUs, and these ranks would run on the CPU ({found}, "
            f"{_torch(machine)} is installed); use --backend gloo"
        )


def _check_ranks(machine: Machine, ranks: int, backend: str, device: str, *, allow_single: bool) -> None:
    if ranks == 1 and not allow_single:
        one_gpu = device == "cuda" and len(machine.gpus) == 1
        raise UserError(
            f"--nproc 1{' (one GPU was found)' if one_gpu else ''}: one rank moves nothing, and is the sign that every "
            f"node ran alone; use --nproc 2{' --device cpu' if one_gpu else ''}, or --allow-single if one rank is meant"
        )
    if backend == "nccl" and ranks > len(machine.gpus):
        fewer = f"--nproc {len(machine.gpus)}" if len(machine.gpus) > 1 else "--device cpu"
        raise UserError(
            f"--nproc {ranks}: nccl needs a GPU for each rank, and {_gpus(machine)} found; "
            f"use {fewer} or --backend gloo"
        )


def _rank_bytes(machine: Machine, device: str, ranks: int) -> int | None:
    """Return a rank's part of the host's memory, or of the smallest GPU's."""
    if device == "cpu":
        return None if machine.memory_bytes is None else machine.memory_bytes // ranks
    known = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
    ranks_per_gpu = math.ceil(ranks / len(machine.gpus))
    return min(known) // ranks_per_gpu if len(known) == len(machine.gpus) else None


def _fallback_notes(machine: Machine, device: str) -> tuple[str, ...]:
    if device == "cuda" or not machine.gpus:
        return ()
    if not machine.torch_has_cuda:
        return (f"{_gpus(machine)} found, but {_torch(machine)} is installed: measuring the CPU",)
    return (
        "one GPU found, and a collective needs two ranks: measuring the CPU; "
        "--nproc 1 --allow-single --device cuda measures the GPU alone",
    )


def _gpus(machine: Machine) -> str:
    number = len(machine.gpus)
    return f"{number or 'no'} {'GPU was' if number < 2 else 'GPUs were'}"


def _torch(machine: Machine) -> str:
    builds = {True: "with CUDA", False: "without CUDA", None: "not known to have CUDA"}
    return f"torch {machine.torch_version or 'of unknown version'} ({builds[machine.torch_has_cuda]})"
