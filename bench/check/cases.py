"""The cases that a check measures, and the rates of devices that follow from them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parbench.bench.check.rule import MIN_REPETITIONS
from parbench.bench.plan.groups import parse_pairs
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import Entry
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.samples import load_rank_samples
from parbench.bench.results.stats import median, quantile

ALONE = {"group": "contiguous:1", "concurrent": "false"}  # one rank at a time
ALONE_SUFFIX = " alone"
# Other work interrupts most samples on a CPU, and the fastest show what it can do.
_CPU_QUANTILE = 0.05

_GPU_FIX = "see its clocks, power and heat (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); reset it, then replace it"
_CPU_FIX = "see what else ran there (top, ps -eLo psr,comm), its clock and heat (turbostat), and empty memory channels"
_HOST_LINK_FIX = "see its PCIe lanes and generation (lspci -vv), its NUMA node and IOMMU; reseat it"
_LINK_FIX = "see nvidia-smi nvlink -s and -e, nvidia-smi topo -m, dmesg (Xid); between nodes ibstat and the cable"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A rate that all devices have in common, measured by a case on all ranks at once."""

    name: str
    unit: str  # of the amount; rates are per second
    case: str
    gpu_params: Mapping[str, str]
    cpu_params: Mapping[str, str] | None  # None if a group of cores has no such rate
    has_alone: bool = True  # whether each device is also measured while the others wait
    fix: str  # for a slow device


# Cases on CPUs are short, so that other work does not interrupt all samples. Data on GPUs is larger
# than their caches.
QUANTITIES = (
    Quantity(
        name="bfloat16",
        unit="FLOP/s",
        case="gemm",
        gpu_params={"m": "8192", "dtype": "bfloat16"},
        cpu_params={"m": "256", "dtype": "bfloat16"},
        fix=_GPU_FIX,
    ),
    Quantity(
        name="float32",
        unit="FLOP/s",
        case="gemm",
        gpu_params={"m": "4096", "dtype": "float32"},
        cpu_params={"m": "256", "dtype": "float32"},
        fix=_GPU_FIX,
    ),
    Quantity(
        name="copy",
        unit="B/s",
        case="copy",
        gpu_params={"size_bytes": "512M", "mode": "blocking"},
        cpu_params={"size_bytes": "8M", "mode": "blocking"},
        fix=_GPU_FIX,
    ),
    Quantity(
        name="to device",
        unit="B/s",
        case="to_device",
        gpu_params={"size_bytes": "256M", "mode": "blocking"},
        cpu_params=None,
        fix=_HOST_LINK_FIX,
    ),
    Quantity(
        name="from device",
        unit="B/s",
        case="from_device",
        gpu_params={"size_bytes": "256M", "mode": "blocking"},
        cpu_params=None,
        fix=_HOST_LINK_FIX,
    ),
    Quantity(
        name="pairs",
        unit="B/s",
        case="pairwise",
        gpu_params={"size_bytes": "128M", "mode": "blocking"},
        cpu_params={"size_bytes": "1M", "mode": "blocking"},
        has_alone=False,
        fix=_LINK_FIX,
    ),
    Quantity(
        name="all ranks",
        unit="B/s",
        case="all_reduce",
        gpu_params={"size_bytes": "256M", "mode": "blocking"},
        cpu_params={"size_bytes": "1M", "mode": "blocking"},
        has_alone=False,
        fix=_LINK_FIX,
    ),
)
QUANTITY_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def find_fix(name: str, device: str) -> str:
    """Return the fix for a rate that is slow on a device of this kind (``cuda`` or ``cpu``)."""
    fix = QUANTITY_BY_NAME[name.removesuffix(ALONE_SUFFIX)].fix
    return _CPU_FIX if device == "cpu" and fix != _LINK_FIX else fix


def make_options(device: str, nproc: int, *, budget: str, timeout: str, inject: str | None) -> Options:
    """Return the options of the run that measures all quantities."""
    entries = []
    for quantity in QUANTITIES:
        params = quantity.gpu_params if device == "cuda" else quantity.cpu_params
        if params is None:
            continue
        if nproc > 1 or quantity.has_alone:
            entries.append(Entry(name=quantity.case, set=dict(params)))
        if nproc > 1 and quantity.has_alone:
            entries.append(Entry(name=quantity.case, set={**params, **ALONE}))
    return Options(
        preset="smoke",
        entries=tuple(entries),
        device=device,
        nproc=nproc,
        allow_single=True,
        launches=MIN_REPETITIONS,
        budget=budget,
        timeout=timeout,
        inject=inject,
    )


def get_rate_name(record: Record) -> str:
    """Return the name of a record's quantity, with a suffix if each rank was measured alone."""
    params = record.case.whole
    quantities = [quantity for quantity in QUANTITIES if quantity.case == record.case.short_name]
    names = [quantity.name for quantity in quantities]
    dtype = str(params.get("dtype"))
    name = dtype if dtype in names else names[0]
    return name if params.get("group", "world") == "world" else name + ALONE_SUFFIX


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The rates of a run. The innermost key is the repetition."""

    # By quantity and rank.
    by_rank: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    by_pair: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=dict)  # of all ranks


def read_rates(run: Run) -> MeasuredRates:
    """Read the rates from the samples of a run; raises UserError if they are damaged."""
    rates = MeasuredRates()
    for record in run.records:
        if record.status != "ok":
            continue
        name = get_rate_name(record)
        for ranks, rate in _compute_rates(run, record):
            if len(ranks) == 1:
                by_rank = rates.by_rank.setdefault(name, {})
                by_rank.setdefault(ranks[0], {})[record.launch] = rate
            elif name == "pairs":
                rates.by_pair.setdefault((ranks[0], ranks[1]), {})[record.launch] = rate
            else:
                rates.together[record.launch] = rate
    return rates


def _compute_rates(run: Run, record: Record) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the ranks that worked together in a record, with the rate of the slowest of them."""
    samples = load_rank_samples(run, record)
    if "duration_ns" not in samples:
        return
    seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
    seconds_by_rank = dict(zip(samples["ranks"].tolist(), seconds.tolist(), strict=True))
    amount = _compute_amount(record)
    for ranks in _list_groups(record, tuple(seconds_by_rank)):
        slowest = list(map(max, zip(*(seconds_by_rank[rank] for rank in ranks), strict=True)))
        is_gpu = record.world.device == "cuda"
        typical = median(slowest) if is_gpu else quantile(slowest, _CPU_QUANTILE)
        yield ranks, amount / typical


def _compute_amount(record: Record) -> float:
    """Return the floating-point operations or bytes of one step."""
    details = record.details
    if "m" in details:
        return float(2 * details["m"] ** 3)
    return float(details["size_bytes"] * details.get("busbw_factor", 1.0))


def _list_groups(record: Record, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    name = get_rate_name(record)
    if name == "pairs":
        return list(parse_pairs(str(record.details["pairs"]), record.world.size))
    if name == "all ranks":
        return [ranks]
    return [(rank,) for rank in ranks]
