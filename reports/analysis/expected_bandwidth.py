"""Published bus bandwidths of GPUs at large sizes, shown next to measured ones as a reference."""

from collections.abc import Iterator
from typing import NamedTuple

from parbench.bench.results.formatting import GIGA, format_percent, format_quantity
from parbench.reports.run_data import RunData

GPUS_PER_NODE = 8
ALL_REDUCE = ("all_reduce",)
OTHERS = ("all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv")
COLLECTIVES = (*ALL_REDUCE, *OTHERS)
NVSWITCH = "NVLink between 8 GPUs"
NVLS = "NVLink with NVLS between 8 GPUs"
ISSUE_212 = "https://github.com/NVIDIA/nccl-tests/issues/212"


class ExpectedBandwidth(NamedTuple):
    """The bus bandwidth that some collectives reach on one node with eight GPUs, as published."""

    gpu: str
    """A part of the GPU's name, such as ``H100``."""
    operations: tuple[str, ...]
    """The names of the collectives, such as ``all_reduce``."""
    link: str
    """A phrase about the links between the GPUs."""
    gigabytes_per_second: float
    """The bus bandwidth in 1e9 bytes per second."""
    source: str
    """The address of the page that published the number."""


EXPECTED = (
    ExpectedBandwidth("H100", ALL_REDUCE, NVLS, 480, ISSUE_212),
    ExpectedBandwidth("H100", OTHERS, NVSWITCH, 370, ISSUE_212),
    ExpectedBandwidth(
        "H200", ALL_REDUCE, NVLS, 475, "https://github.com/NVIDIA/nccl-tests/issues/272"
    ),
    ExpectedBandwidth("B200", ALL_REDUCE, NVLS, 830, "https://github.com/NVIDIA/nccl/issues/1807"),
    ExpectedBandwidth(
        "A100-SXM",
        COLLECTIVES,
        NVSWITCH,
        230,
        "https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests",
    ),
    ExpectedBandwidth(
        "RTX 5090",
        ALL_REDUCE,
        "PCIe between 8 GPUs",
        28,
        "https://github.com/NVIDIA/nccl/issues/1639",
    ),
)


def describe_expected(data: RunData) -> Iterator[str]:
    """Yield sentences that compare a run's bus bandwidth with the published one of the same GPU.

    There is a sentence for each collective that ran on all eight GPUs of one node and has a
    published number. The fastest measured case of the collective counts.
    """
    environment = data.run.info.environment or {}
    gpu = (environment.get("torch") or environment.get("imported") or {}).get("gpu") or ""
    rates: dict[str, float] = {}
    for result in data.communication:
        if result.world.nodes == 1 and result.num_ranks == GPUS_PER_NODE:
            name = result.case.short_name
            rates[name] = max(rates.get(name, 0.0), result.value("busbw") or 0.0)
    for expected in EXPECTED:
        for name in expected.operations:
            if expected.gpu in gpu and name in rates:
                share = format_percent(rates[name] / (expected.gigabytes_per_second * GIGA))
                yield (
                    f"{name}: {format_quantity(rates[name], 'B/s')} is {share} of the published "
                    f"{expected.gigabytes_per_second:g} GB/s of {expected.gpu} "
                    f"({expected.link}, {expected.source})."
                )
