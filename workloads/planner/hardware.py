"""Machines as numbers: what a GPU holds and computes, what its links carry, what a step reaches. Pure.

Rates are of one GPU; links count one direction. ``PRESETS`` are 8-GPU nodes with one network card for each GPU. Each
preset's ``source`` names where its figures are from, which of them were read there or in a quotation of it, which
nobody checked; peaks are those of ``workloads.step.peaks``. The vendor counts NVLink in both directions together, and
peaks with sparsity: half of both is here. Latencies and efficiencies are assumptions of this planner, not measured:
print them, and replace them.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from parbench.bench.files import read_toml
from parbench.bench.limits import NumRanks
from parbench.bench.text import UserError, format_choices, format_list, suggest_similar
from parbench.workloads.step.peaks import datasheet_peak

Rate = Annotated[float, msgspec.Meta(ge=1, le=1e30)]
"""Bytes, or operations; of a machine's, each in a second."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Traffic = Annotated[float, msgspec.Meta(ge=0, le=100)]
PositiveShare = Annotated[float, msgspec.Meta(ge=1e-6, le=1)]
Latency = Annotated[float, msgspec.Meta(ge=0, le=1000)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]

OVERLAP = {"dp": 0.9, "edp": 0.9, "fsdp": 0.75, "efsdp": 0.75, "cp": 0.9}
"""By axis, the share of its communication that is assumed to hide behind compute."""
HIDEABLE = (*OVERLAP, "ep")
"""The axes that may be given a share; ep's hides where another microbatch computes meanwhile, as in DualPipe."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What share of a rate a step reaches, and of the communication that could hide how much does; all assumptions.

    ``gemm`` is of the dense peak, over whole layers with what is not a matrix product; ``memory`` is what a step may
    fill, the rest is the runtime's. ``overlap`` is by axis; one that is not there is exposed.
    """

    gemm: PositiveShare = 0.80
    attention: PositiveShare = 0.55
    gemm_traffic: Traffic = 1.3
    elementwise_traffic: Traffic = 1.0
    score_traffic: Traffic = 0.0
    links_inside: PositiveShare = 0.80
    links_across: PositiveShare = 0.80
    memory_rate: PositiveShare = 0.80
    memory: PositiveShare = 0.92
    overlap: dict[str, Share] = msgspec.field(default_factory=lambda: OVERLAP.copy())

    def __post_init__(self) -> None:
        for name in self.overlap:
            if name not in HIDEABLE:
                raise ValueError(f"overlap of {name!r} is not of {format_choices(HIDEABLE, name)}")


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU, and how its nodes are built.

    ``flops_per_second`` are bfloat16's, ``float32_share`` is what of them float32 has: TF32 is half on all presets.
    ``across_bytes_per_second`` is one GPU's own card. ``rails`` is how many of a node's cards one collective can drive
    at once, 0 for as many as it has ranks there. Latencies are of one hop of a ring, ``launch_seconds`` of any call.
    ``links_from`` says what tells a call's time where these rates do not. Above the node, ``nodes_per_pod`` nodes share
    links to others whose rate together is that of their cards over ``oversubscription``; 0 is one pod for all.
    """

    name: str
    source: str
    flops_per_second: Rate
    float32_share: PositiveShare = 0.5
    memory_bytes: Rate
    memory_bytes_per_second: Rate
    gpus_per_node: NumRanks = 8
    inside_bytes_per_second: Rate
    across_bytes_per_second: Rate
    rails: Number = 0
    kernel_seconds: Latency = 3e-6
    launch_seconds: Latency = 8e-6
    inside_hop_seconds: Latency = 2e-6
    across_hop_seconds: Latency = 6e-6
    nodes_per_pod: Number = 0
    oversubscription: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.0
    links_from: str = ""
    efficiency: Efficiency = Efficiency()

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes * self.efficiency.memory

    @property
    def memory_rate(self) -> float:
        """Bytes per second that kernels move."""
        return self.memory_bytes_per_second * self.efficiency.memory_rate

    def peak(self, bytes_per_element: int) -> float:
        """Return the peak FLOP/s of elements of 2 or 4 bytes."""
        share = 1.0 if bytes_per_element < 4 else self.float32_share
        return self.flops_per_second * share

    @property
    def inside_rate(self) -> float:
        """Bytes per second between GPUs of a node."""
        return self.inside_bytes_per_second * self.efficiency.links_inside

    @property
    def card_rate(self) -> float:
        """Bytes per second of one GPU's own card."""
        return self.across_bytes_per_second * self.efficiency.links_across


_SOURCES = {
    "a100": "NVIDIA A100 datasheet (nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf): peak, memory, NVLink as "
    "glennklockwood.com/garden/processors/A100 quotes it; DGX A100's cards of 200 Gbit/s not checked",
    "h100": "NVIDIA H100 datasheet: peak, memory, NVLink as glennklockwood.com/garden/processors/h100 quotes it, which "
    "doubts the memory's rate; DGX H100's cards of 400 Gbit/s not checked",
    "h200": "NVIDIA's submission to MLPerf inference (github.com/mlcommons/inference_results_v4.1, "
    "closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json): memory, NVLink, cards of 400 Gbit/s; the memory's rate and "
    "the peak, H100's, not checked with the vendor",
    "h800": "NVIDIA H800: H100 with NVLink of 200 GB/s each way (arXiv 2412.19437, section 3.2.2: 160 of them); "
    "memory as H100's; not checked with the vendor",
    "b200": "NVIDIA DGX B200 user guide (docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html): memory, "
    "NVLink, eight ConnectX-7; peak and the memory's rate as glennklockwood.com/garden/processors/B200 quotes the "
    "datasheet; the cards' 400 Gbit/s not checked",
}


LARGEST_GEMM_SHARES = {"a100": 0.859, "h100": 0.801}
"""Of the peak, by the fastest GEMM that was found (Bekman, Machine Learning Engineering, MAMF)."""
SUSTAINED_SHARE = 0.9
"""Of the fastest GEMM's rate, what clocks allow for a long time. Calibrated to published runs."""


def _preset(name: str, memory: float, memory_rate: float, nvlink: float, card: float) -> Hardware:
    peak = datasheet_peak({"h100": "H100 SXM5", "h800": "H100 SXM5"}.get(name, name), "bfloat16")
    assert peak is not None
    return Hardware(
        name=name,
        source=_SOURCES[name],
        flops_per_second=peak,
        memory_bytes=memory,
        memory_bytes_per_second=memory_rate,
        inside_bytes_per_second=nvlink,
        across_bytes_per_second=card,
        efficiency=Efficiency(gemm=SUSTAINED_SHARE * LARGEST_GEMM_SHARES.get(name, 0.801)),
    )


PRESETS = {
    "a100": _preset("a100", 80e9, 2.039e12, 300e9, 25e9),
    "h100": _preset("h100", 80e9, 3.35e12, 450e9, 50e9),
    "h800": _preset("h800", 80e9, 3.35e12, 200e9, 50e9),
    "h200": _preset("h200", 141e9, 4.8e12, 450e9, 50e9),
    "b200": _preset("b200", 180e9, 8e12, 900e9, 50e9),
}


def hardware_of(text: str) -> Hardware:
    """Return a preset, or what a ``.toml`` file declares, with a table ``[efficiency]``."""
    if text.endswith(".toml"):
        path = Path(text)
        return read_toml(path, "hardware file", Hardware, name=path.stem, source=text)
    if text.lower() not in PRESETS:
        hint = suggest_similar(text.lower(), PRESETS)
        raise UserError(
            f"hardware {text!r} is not {format_list(PRESETS)}, nor a file ending in .toml{hint}"
        )
    return PRESETS[text.lower()]
