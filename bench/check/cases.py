"""What a check measures, as cases that there are already, and what each device reached in each launch of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parbench.bench.check.rule import MIN_REPETITIONS
from parbench.bench.plan.groups import parse_pairs
from parbench.bench.plan.options import Options
from parbench.bench.plan.plan import Entry
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.bench.results.samples import load_rank_samples
from parbench.bench.results.stats import median, quantile

ALONE = {"group": "contiguous:1", "concurrent": "false"}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A rate of a device in 1e9 of ``unit``, of a case on all ranks at once (and alone, each in turn).

    ``on_gpu`` are its parameters on a GPU, ``on_cpu`` on a group of cores, None where there is no such thing.
    """

    name: str
    unit: str
    case: str
    on_gpu: Mapping[str, str]
    on_cpu: Mapping[str, str] | None
    alone: bool = True
    remedy: str


_SLOW_GPU = "see its clocks, power and heat (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE); reset it, then replace it"
_HOST_LINK = "see its PCIe lanes and generation (lspci -vv), its NUMA node and IOMMU; reseat it"
_LINKS = "see nvidia-smi nvlink -s and -e, nvidia-smi topo -m, dmesg (Xid); between nodes ibstat and the cable"

# on CPUs short, so that some are not interrupted by other work; on GPUs larger than caches, and longer than a launch
QUANTITIES = (
    Quantity(
        name="bfloat16", unit="FLOP/s", case="gemm", remedy=_SLOW_GPU,
        on_gpu={"m": "8192", "dtype": "bfloat16"}, on_cpu={"m": "256", "dtype": "bfloat16"},
    ),
    Quantity(
        name="float32", unit="FLOP/s", case="gemm", remedy=_SLOW_GPU,
        on_gpu={"m": "4096", "dtype": "float32"}, on_cpu={"m": "256", "dtype": "float32"},
    ),
    Quantity(
        name="copy", unit="B/s", case="copy", remedy=_SLOW_GPU,
        on_gpu={"size_bytes": "512M", "mode": "blocking"}, on_cpu={"size_bytes": "8M", "mode": "blocking"},
    ),
    Quantity(
        name="to device", unit="B/s", case="to_device", remedy=_HOST_LINK,
        on_gpu={"size_bytes": "256M", "mode": "blocking"}, on_cpu=None,
    ),
    Quantity(
        name="from device", unit="B/s", case="from_device", remedy=_HOST_LINK,
        on_gpu={"size_bytes": "256M", "mode": "blocking"}, on_cpu=None,
    ),
    Quantity(
        name="pairs", unit="B/s", case="pairwise", alone=False, remedy=_LINKS,
        on_gpu={"size_bytes": "128M", "mode": "blocking"}, on_cpu={"size_bytes": "1M", "mode": "blocking"},
    ),
    Quantity(
        name="all ranks", unit="B/s", case="all_reduce", alone=False, remedy=_LINKS,
        on_gpu={"size_bytes": "256M", "mode": "blocking"}, on_cpu={"size_bytes": "1M", "mode": "blocking"},
    ),
)  # fmt: skip
BY_NAME = {one.name: one for one in QUANTITIES}
_CPU_REMEDY = (
    "see what else ran there (top, ps -eLo psr,comm), its clock and heat (turbostat), and memory channels left empty"
)


def remedy_of(name: str, device: str) -> str:
    quantity = BY_NAME[name.removesuffix(" alone")]
    return _CPU_REMEDY if device == "cpu" and quantity.remedy is not _LINKS else quantity.remedy


def options_of(device: str, nproc: int, *, budget: str, timeout: str, inject: str | None) -> Options:
    """Return what ``parbench run`` is to measure: all ranks at once, and each by itself."""
    entries = []
    for one in QUANTITIES:
        settings = one.on_gpu if device == "cuda" else one.on_cpu
        if settings is not None and (nproc > 1 or one.alone):
            entries.append(Entry(name=one.case, set=dict(settings)))
            if one.alone and nproc > 1:
                entries.append(Entry(name=one.case, set={**settings, **ALONE}))
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


def name_of(record: Record) -> str:
    """Return the name of the quantity that a case measures."""
    case, whole = record.case.short_name, record.case.whole
    of = [one for one in QUANTITIES if one.case == case]
    name = next((one.name for one in of if one.name == whole.get("dtype")), of[0].name)
    return f"{name} alone" if whole.get("group", "world") != "world" else name


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Rates by quantity, device (a rank) and launch; those of pairs by pair, and of all ranks together."""

    by_rank: Mapping[str, Mapping[int, Mapping[int, float]]]
    by_pair: Mapping[tuple[int, int], Mapping[int, float]]
    together: Mapping[int, float]


def reached(run: Run) -> Reached:
    """Read what each rank reached; ``UserError`` if samples are damaged.

    On a GPU its median counts, on a CPU its fastest twentieth: other work interrupts the rest.
    """
    by_rank: dict[str, dict[int, dict[int, float]]] = {}
    by_pair: dict[tuple[int, int], dict[int, float]] = {}
    together: dict[int, float] = {}
    for record in run.records:
        if record.status == "ok":
            for ranks, rate in _rates(run, record):
                if len(ranks) == 1:
                    by_rank.setdefault(name_of(record), {}).setdefault(ranks[0], {})[record.launch] = rate
                elif name_of(record) == "pairs":
                    by_pair.setdefault((ranks[0], ranks[1]), {})[record.launch] = rate
                else:
                    together[record.launch] = rate
    return Reached(by_rank=by_rank, by_pair=by_pair, together=together)


def _rates(run: Run, record: Record) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield who did something together in a record, and at what rate."""
    samples = load_rank_samples(run, record)
    if "duration_ns" not in samples:
        return
    seconds = samples["duration_ns"] / 1e9 / int(samples["steps_per_sample"])
    own = dict(zip(samples["ranks"].tolist(), seconds.tolist(), strict=True))
    details = record.details
    if name_of(record) == "pairs":
        together: list[tuple[int, ...]] = [*parse_pairs(str(details["pairs"]), record.world.size)]
    else:
        together = [tuple(own)] if name_of(record) == "all ranks" else [(rank,) for rank in own]
    amount = 2 * details["m"] ** 3 if "m" in details else details["size_bytes"] * details.get("busbw_factor", 1.0)
    for ranks in together:
        slowest = [max(at_once) for at_once in zip(*(own[rank] for rank in ranks), strict=True)]
        typical = median(slowest) if record.world.device == "cuda" else quantile(slowest, 0.05)
        yield ranks, amount / typical
