"""The benchmark cases that ``parbench check`` runs, and the rates of devices in their results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parbench.bench.check.rule import MIN_REPETITIONS
from parbench.bench.plan.groups import Ranks, parse_pairs
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import Entry
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run, load_rank_samples

LOADED_QUANTITY = "bfloat16"
"""The name of the quantity before which all GPUs work at full power for some seconds."""
LOAD_SECONDS = 4
"""The seconds for which all GPUs work at full power in each repetition, until clocks are steady."""
# Other work interrupts most samples on a CPU, and the fastest show what it can do.
_CPU_QUANTILE = 0.05

_GPU_FIX = (
    "check its clocks, power and temperature "
    "(nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); reset it, then replace it"
)
_CPU_FIX = (
    "check for other processes (top, ps -eLo psr,comm), its clock and temperature (turbostat), "
    "and empty memory channels"
)
_HOST_LINK_FIX = "check PCIe lanes and generation (lspci -vv), NUMA node and IOMMU; reseat it"
LINK_FIX = (
    "run nvidia-smi nvlink -s and -e, nvidia-smi topo -m and dmesg (Xid); "
    "between nodes, run ibstat and check the cable"
)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A rate that is compared between devices (GPUs or groups of cores), such as copy bandwidth.

    A benchmark case measures the rate on all ranks at the same time, with one rank on each device.
    """

    name: str
    """The name, such as ``copy``. For a matrix multiplication it is the dtype."""
    case: str = "gemm"
    """The short name of the benchmark case that measures the rate: ``copy`` for ``memory.copy``."""
    gpu_size: str
    """The size on GPUs as text: bytes per rank, or the number of rows of a square matrix.

    Bytes are written as ``512M``, in which K, M and G are powers of 1024.
    """
    cpu_size: str = ""
    """The size on cores in the form of ``gpu_size``, empty if the rate is not measured on cores."""
    min_devices: int = 1
    """The least number of devices between which the rate is measured, 2 for communication."""
    fix: str
    """Advice to the user about a device that is slow in this rate."""

    @property
    def unit(self) -> str:
        """The unit of the rate: FLOP/s for matrix multiplications, otherwise B/s."""
        return "FLOP/s" if self.case == "gemm" else "B/s"


# Cases on CPUs are short, so that other work does not interrupt all samples. Data on GPUs is larger
# than their caches.
QUANTITIES = (
    Quantity(name="bfloat16", gpu_size="8192", cpu_size="256", fix=_GPU_FIX),
    Quantity(name="float32", gpu_size="4096", cpu_size="256", fix=_GPU_FIX),
    Quantity(name="copy", case="copy", gpu_size="512M", cpu_size="8M", fix=_GPU_FIX),
    Quantity(name="to device", case="to_device", gpu_size="256M", fix=_HOST_LINK_FIX),
    Quantity(name="from device", case="from_device", gpu_size="256M", fix=_HOST_LINK_FIX),
    Quantity(
        name="pairs",
        case="pairwise",
        gpu_size="128M",
        cpu_size="1M",
        min_devices=2,
        fix=LINK_FIX,
    ),
    Quantity(
        name="all ranks",
        case="all_reduce",
        gpu_size="1G",  # 256M is below the plateau of eight GPUs with NVLink SHARP
        cpu_size="1M",
        min_devices=2,
        fix=LINK_FIX,
    ),
)
"""The rates that a check measures and compares, in the order of the columns of its table."""
QUANTITY_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
"""The quantities of ``QUANTITIES`` by name."""


def find_fix(name: str, *, is_gpu: bool) -> str:
    """Return the advice about a device that is slow in the quantity ``name``.

    If ``is_gpu`` is False, the device is a group of cores.
    """
    fix = QUANTITY_BY_NAME[name].fix
    return fix if is_gpu or fix == LINK_FIX else _CPU_FIX


def make_options(device: str, nproc: int, *, budget: str, inject: str | None) -> Options:
    """Return the options of the ``parbench run`` in which a check measures all quantities.

    ``device`` is ``cuda`` or ``cpu``. ``nproc`` is the number of ranks. ``budget`` is the time
    for the whole run, such as ``40s``. ``inject`` is a fault to simulate, such as ``slow:1:20%``
    for rank 1, and None for no fault.
    """
    entries = []
    for quantity in QUANTITIES:
        size = quantity.gpu_size if device == "cuda" else quantity.cpu_size
        if not size or nproc < quantity.min_devices:
            continue
        params = {"size_bytes": size, "mode": "blocking"}
        if quantity.case == "gemm":
            params = {"m": size, "dtype": quantity.name}
        if device == "cuda" and quantity.name == LOADED_QUANTITY:
            params["load_seconds"] = str(LOAD_SECONDS)
        entries.append(Entry(name=quantity.case, set=params))
    return Options(
        preset="smoke",
        entries=tuple(entries),
        device=device,
        nproc=nproc,
        repetitions=MIN_REPETITIONS,
        budget=budget,
        timeout="20s",
        inject=inject,
    )


def get_quantity_name(record: Record) -> str:
    """Return the name of the quantity that the case of a record measures, such as ``copy``."""
    case = record.case.short_name
    if case == "gemm":
        return str(record.case.all_params["dtype"])
    [name] = [quantity.name for quantity in QUANTITIES if quantity.case == case]
    return name


Rates = dict[str, dict[Ranks, dict[int, float]]]
"""Rates in B/s or FLOP/s, in nested dicts with three keys.

The keys are the name of the quantity, the ranks that worked together (a single rank except for
communication), and the number of the repetition.
"""


def read_rates(run: Run) -> Rates:
    """Return the rates of all successful cases of a run, by quantity, ranks and repetition.

    A rate is the work of one step of a rank (floating-point operations, or bytes times the
    bus-bandwidth factor of nccl-tests) divided by the time of a step. In each sample, the slowest
    rank of the ranks that work together determines the time. Over the samples of a repetition, the
    median time is taken on GPUs. On CPUs, where other work slows most samples, the 5 % quantile of
    the times is taken. Raises ``UserError`` if a sample file of the run is damaged.
    """
    rates: Rates = {}
    for record in run.records:
        samples = load_rank_samples(run, record) if record.status == "ok" else {}
        if "duration_ns" not in samples:
            continue
        name = get_quantity_name(record)
        details = record.details
        amount = details.get("size_bytes", 0) * details.get("busbw_factor", 1.0)
        if "m" in details:
            amount = 2 * details["m"] ** 3
        ranks = samples["ranks"].tolist()
        groups: Sequence[Ranks] = [(rank,) for rank in ranks]
        if name == "pairs":
            groups = parse_pairs(str(details["pairs"]), record.world.size)
        elif name == "all ranks":
            groups = [tuple(ranks)]
        seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
        quantile = 0.5 if record.world.device == "cuda" else _CPU_QUANTILE
        for group in groups:
            slowest = seconds[[ranks.index(rank) for rank in group]].max(axis=0)
            by_group = rates.setdefault(name, {})
            by_repetition = by_group.setdefault(group, {})
            by_repetition[record.repetition] = amount / float(np.quantile(slowest, quantile))
    return rates
