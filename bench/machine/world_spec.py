"""The world of a run: number of ranks, backend and device, from the options and the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parbench.bench.machine.gpu import GPU_FIX
from parbench.bench.machine.machine import SHARING_VARIABLE, Machine
from parbench.bench.text import UserError, pluralize

_MAX_RANKS = 1 << 12
_MAX_DEFAULT_RANKS = 8  # on cores


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """The planned ranks of a run: their number, backend, device and distribution over nodes."""

    nproc: int
    """The number of ranks on all nodes together."""
    backend: str
    """``gloo`` or ``nccl``."""
    device: str
    """``cpu`` or ``cuda``."""
    rank_bytes: int | None = None
    """The memory in bytes that one rank can use on its device (host RAM for ``cpu``).

    None if it is unknown.
    """
    nodes: int = 1
    """The number of nodes on which the ranks run."""
    distribution: str = "block"
    """The order of ranks on nodes, as in Slurm.

    ``block`` fills a node with successive ranks, ``cyclic`` assigns successive ranks to the nodes
    round-robin.
    """
    notes: tuple[str, ...] = ()
    """Notes for the user about the ranks and their device.

    For example, that the CPU is measured although a GPU was found, that some GPUs do not answer, or
    that there are more ranks than cores.
    """

    @property
    def gloo_on_gpus(self) -> bool:
        """True if the backend is gloo and the tensors are on GPUs.

        Torch supports this only in some collectives.
        """
        return self.backend == "gloo" and self.device == "cuda"

    @property
    def hosts(self) -> list[str]:
        """The node of each rank in rank order, as the number of the node in text form.

        The numbers begin at ``"0"`` and stand for host names, which are not known yet. All nodes
        are assumed to have equally many ranks.
        """
        ranks_per_node = -(-self.nproc // self.nodes)
        if self.distribution == "cyclic":
            return [str(rank % self.nodes) for rank in range(self.nproc)]
        return [str(rank // ranks_per_node) for rank in range(self.nproc)]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The rank of this process among the ranks that a launcher such as torchrun has started.

    The values are from the environment variables ``RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``.
    """

    rank: int
    """The global rank of this process."""
    size: int
    """The number of all ranks."""
    local_size: int
    """The number of ranks on this host, equal to ``size`` if LOCAL_WORLD_SIZE is not set."""

    @staticmethod
    def find(environ: Mapping[str, str]) -> "Joined | None":
        """Return this process's rank and the numbers of ranks that a launcher has set.

        They are in the variables RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of ``environ``. The result
        is None if RANK or WORLD_SIZE is not set, because then no launcher started this process as a
        rank. Raises ``UserError`` if MASTER_ADDR or MASTER_PORT is missing, or if one of the three
        variables has a value that is not a whole number.
        """
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            raise UserError(
                "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT",
                hint="set all four variables, or unset RANK and WORLD_SIZE",
            )
        local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
        numbers = []
        for name in ("RANK", "WORLD_SIZE", local_name):
            try:
                numbers.append(int(environ[name]))
            except ValueError:
                raise UserError(f"{name}={environ[name]!r} is not a whole number") from None
        rank, size, local_size = numbers
        return Joined(rank=rank, size=size, local_size=local_size)


def make_launcher_error(command: str) -> UserError:
    """Return the error of a command that starts its own ranks, in a process that is a rank.

    ``command`` is the command or option, such as ``parbench check``.
    """
    return UserError(
        f"{command} starts its own ranks, but a launcher such as torchrun has started this process "
        "(RANK is set)",
        hint="start it without the launcher, or unset RANK and WORLD_SIZE",
    )


def choose_world(
    machine: Machine,
    *,
    nproc: int | None,
    backend: str | None,
    device: str | None,
    allow_single: bool,
) -> WorldSpec:
    """Choose the number of ranks, the backend and the device for one node.

    Raises ``UserError`` if torch is missing, or if the machine cannot run these ranks.

    Args:
        machine: the cores, GPUs and torch of the node.
        nproc: the value of ``--nproc``. None stands for the number of GPUs if they are used. On
            the CPU, it stands for the number of cores, but at least 2 and at most 8.
        backend: the value of ``--backend``. None stands for ``nccl`` on GPUs, ``gloo`` on the CPU.
        device: the value of ``--device``. None stands for ``cuda`` if torch supports it and there
            are at least two GPUs, otherwise for ``cpu``. One GPU is enough if a single rank is
            permitted and ``nproc`` is 1 or None.
        allow_single: True if a single rank is permitted.
    """
    if machine.torch_version is None:
        raise UserError(
            "torch is not installed in this Python environment: install it with pip install 'torch>=2.11'"
        )
    notes = [machine.describe_silent_gpus() if device == "cuda" else ""]
    if device is None:
        device = _choose_device(machine, 1 if nproc in (None, 1) and allow_single else 2)
        if device == "cpu" and machine.gpus:
            hardware = _describe_hardware(machine)
            hint = "--nproc 1 --device cuda measures one GPU"
            notes.append(f"{hardware}: measuring the CPU. {hint}")
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    default_ranks = max(2, min(_MAX_DEFAULT_RANKS, machine.cores))
    if device == "cuda":
        default_ranks = len(machine.gpus)
    ranks = default_ranks if nproc is None else nproc
    _check_devices(machine, ranks, backend, device)
    if not 1 <= ranks <= _MAX_RANKS:
        raise UserError(f"--nproc {ranks}: 1 to {_MAX_RANKS} ranks are possible")
    if ranks == 1 and not allow_single:
        raise UserError(
            "the run has 1 rank, and at least 2 are needed",
            hint="use --nproc 2 --device cpu, or --nproc 1 to measure one rank. "
            "With a launcher, check WORLD_SIZE",
        )
    notes.append(_describe_sharing(machine, ranks, device))
    return WorldSpec(
        nproc=ranks,
        backend=backend,
        device=device,
        rank_bytes=_compute_rank_bytes(machine, ranks, device),
        notes=tuple(note for note in notes if note),
    )


def _choose_device(machine: Machine, min_gpus: int) -> str:
    """Return the default of ``--device``: ``cuda`` if torch supports it and has enough GPUs.

    ``min_gpus`` is the number of GPUs that is enough. Otherwise the default is ``cpu``. Raises
    ``UserError`` if a GPU does not answer, so that the user decides what is measured.
    """
    if machine.silent_gpus:
        hint = "--device cpu measures the cores, --device cuda the GPUs that answer"
        raise UserError(f"{machine.describe_silent_gpus()}; {GPU_FIX}", hint=hint)
    return "cuda" if machine.torch_has_cuda and len(machine.gpus) >= min_gpus else "cpu"


def _check_devices(machine: Machine, ranks: int, backend: str, device: str) -> None:
    """Raise ``UserError`` if a node cannot run so many ranks with this backend on this device.

    ``ranks`` is the number of ranks on the node. NCCL needs a GPU for each rank, unless
    NCCL_MULTI_RANK_GPU_ENABLE permits several on a GPU.
    """
    hardware = _describe_hardware(machine)
    num_gpus = len(machine.gpus)
    if device == "cuda" and not (machine.torch_has_cuda and num_gpus):
        raise UserError(
            f"--device cuda needs a GPU and a torch with CUDA: {hardware}",
            hint="use --device cpu to measure the cores",
        )
    if backend == "nccl" and device == "cpu":
        raise UserError(
            f"--backend nccl needs GPUs, and these ranks would run on the CPU ({hardware})",
            hint="use --backend gloo",
        )
    if backend == "nccl" and ranks > num_gpus and not machine.may_share_gpus:
        raise UserError(
            f"--nproc {ranks}: nccl needs a GPU for each rank ({hardware})",
            hint=f"use --nproc {num_gpus} or --backend gloo, or set {SHARING_VARIABLE}=1 "
            "(NCCL 2.30 or newer) to test functions only",
        )


def _compute_rank_bytes(machine: Machine, ranks: int, device: str) -> int | None:
    """Return the memory in bytes that each of ``ranks`` ranks can use on the smallest device.

    Ranks on GPUs are spread evenly over the GPUs, and ranks on one GPU share its total memory
    equally. Ranks on the CPU share the available memory of the host equally. None if the memory of
    any device is unknown.
    """
    memories: Sequence[int | None] = [machine.memory_bytes]
    if device == "cuda":
        memories = [gpu.memory_bytes for gpu in machine.gpus]
    known_memories = [memory for memory in memories if memory is not None]
    if len(known_memories) < len(memories):
        return None
    max_ranks_per_device = -(-ranks // len(memories))
    return min(known_memories) // max_ranks_per_device


def _describe_sharing(machine: Machine, ranks: int, device: str) -> str:
    """Return a note if a node has more ranks than cores (``cpu``) or GPUs (``cuda``).

    The note is empty if each of the ``ranks`` has a core or GPU of its own.
    """
    available, noun = (machine.cores, "core") if device == "cpu" else (len(machine.gpus), "GPU")
    if ranks <= available:
        return ""
    shared = f"{pluralize(ranks, 'rank')} on {pluralize(available, noun)}"
    return f"oversubscribed: {shared}. Times include waiting for a {noun}."


def _describe_hardware(machine: Machine) -> str:
    """Return the GPUs and the torch of a machine: ``2 GPUs found, torch 2.11.0 with CUDA``.

    GPUs that do not answer follow with the reason.
    """
    cuda = "with" if machine.torch_has_cuda else "without"
    parts = [
        f"{pluralize(len(machine.gpus), 'GPU')} found, torch {machine.torch_version} {cuda} CUDA"
    ]
    if machine.silent_gpus:
        parts.append(machine.describe_silent_gpus())
    return ", ".join(parts)
