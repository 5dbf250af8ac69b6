"""Hardware as numbers: memory, compute and links of a GPU, and the shares a step reaches. Pure.

Rates are those of one GPU, and of a link in one direction. ``PRESETS`` are nodes of 8 GPUs with one
network adapter (NIC) per GPU. The ``source`` of a preset says where its figures come from, and
which of them are not verified. Peaks are those of ``workloads.probes.peaks``. Vendors add up both
directions of NVLink, and count peaks with sparsity: the presets have half of both.

Latencies and efficiencies are assumptions. ``--calibrate`` replaces them with measured ones.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from parbench.bench.files import read_toml
from parbench.bench.limits import NumRanks
from parbench.bench.text import UserError, format_list
from parbench.workloads.probes.peaks import find_datasheet_peak

Rate = Annotated[float, msgspec.Meta(ge=1, le=1e30)]
"""A number of bytes, of bytes per second or of operations per second."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""A fraction from 0 to 1."""
Traffic = Annotated[float, msgspec.Meta(ge=0, le=100)]
"""A factor from 0 to 100 for the bytes that a kernel moves in memory."""
PositiveShare = Annotated[float, msgspec.Meta(ge=1e-6, le=1)]
"""A fraction above 0, at most 1."""
Latency = Annotated[float, msgspec.Meta(ge=0, le=1000)]
"""A time in seconds."""
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""A whole number from 0."""

OVERLAP = {"dp": 0.9, "edp": 0.9, "fsdp": 0.75, "efsdp": 0.75, "cp": 0.9}
"""The fraction of the communication on an axis that compute can hide, by axis of the mesh.

With FSDP, published training takes 10 to 20 % longer than its compute, because a step starts and
ends with exposed calls.
"""
HIDEABLE = (*OVERLAP, "ep")
"""The axes that ``Efficiency.overlap`` may contain.

The communication of ``ep`` can be hidden by another microbatch, as in DualPipe.
"""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fractions of a GPU's declared rates and memory that a training step reaches or uses.

    The fields ``..._traffic`` are the bytes that kernels move. All defaults are assumptions.
    """

    gemm: PositiveShare = 0.72
    """The fraction of the peak FLOP/s that large GEMMs reach."""
    attention: PositiveShare = 0.55
    """The fraction of the peak FLOP/s that fused attention reaches."""
    gemm_traffic: Traffic = 1.3
    """The bytes that a GEMM moves in memory, relative to the bytes of its inputs and output."""
    elementwise_traffic: Traffic = 1.0
    """The bytes that kernels other than GEMMs and attention move, relative to their estimate.

    The estimate is ``compute_time.count_elementwise_bytes``.
    """
    score_traffic: Traffic = 0.0
    """The bytes moved in memory per attention score, 0 if attention is fused."""
    links_inside: PositiveShare = 0.80
    """The fraction of ``Hardware.inside_bytes_per_second`` that communication reaches."""
    links_across: PositiveShare = 0.80
    """The fraction of ``Hardware.across_bytes_per_second`` that communication reaches."""
    memory_rate: PositiveShare = 0.80
    """The fraction of ``Hardware.memory_bytes_per_second`` that kernels reach."""
    memory: PositiveShare = 0.92
    """The fraction of the memory's bytes that a step can use. The runtime needs the rest."""
    overlap: dict[str, Share] = msgspec.field(default_factory=lambda: OVERLAP.copy())
    """The fraction of the communication on an axis that compute can hide, by axis of the mesh.

    The communication of a missing axis is exposed.
    """

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if ``overlap`` has an axis that is not in ``HIDEABLE``."""
        for name in self.overlap:
            if name not in HIDEABLE:
                allowed = format_list(HIDEABLE, "and")
                raise ValueError(f"overlap has the unknown axis {name!r}: allowed are {allowed}")


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A type of GPU, and the links inside and between its nodes."""

    name: str
    """The name of the type of GPU."""
    source: str
    """The origin of the figures, such as a data sheet or the path of a file, as text."""
    flops_per_second: Rate
    """The peak FLOP/s of a GPU for dense bfloat16."""
    float32_share: PositiveShare = 0.5
    """The peak FLOP/s for float32, relative to bfloat16. TF32 reaches half on all presets."""
    memory_bytes: Rate
    """The bytes of one GPU's memory."""
    memory_bytes_per_second: Rate
    """The bytes per second between a GPU and its memory."""
    gpus_per_node: NumRanks = 8
    """The number of GPUs of a node."""
    inside_bytes_per_second: Rate
    """The bytes per second in one direction over all links of one GPU inside its node."""
    across_bytes_per_second: Rate
    """The bytes per second in one direction of a network adapter (NIC), one of which a GPU has."""
    rails: Number = 0
    """The maximum number of network adapters (NICs) of a node that a collective can use.

    0 means one for each rank of the collective's group on the node.
    """
    kernel_seconds: Latency = 3e-6
    """The seconds of the launch of a compute kernel."""
    launch_seconds: Latency = 8e-6
    """The seconds of the launch of a communication call."""
    inside_hop_seconds: Latency = 1e-6
    """The latency of a hop inside a node, in seconds."""
    across_hop_seconds: Latency = 15e-6
    """The latency of a hop between nodes, in seconds."""
    links_from: str = ""
    """The source of measured times of communication calls, as text.

    Empty if these times follow from the rates and latencies of this hardware.
    """
    efficiency: Efficiency = Efficiency()
    """The fractions of the declared rates and memory that a training step reaches or uses."""

    @property
    def usable_bytes(self) -> float:
        """The bytes of a GPU's memory that a step can use."""
        return self.memory_bytes * self.efficiency.memory

    @property
    def memory_rate(self) -> float:
        """The bytes per second that the kernels of a GPU read and write in its memory."""
        return self.memory_bytes_per_second * self.efficiency.memory_rate

    def peak(self, bytes_per_element: int) -> float:
        """Return the dense peak FLOP/s of a GPU for elements of 2 bytes (bfloat16) or 4 bytes."""
        share = 1.0 if bytes_per_element < 4 else self.float32_share
        return self.flops_per_second * share

    @property
    def inside_rate(self) -> float:
        """The bytes per second in one direction that one GPU reaches inside its node.

        They are the declared rate of its links times ``efficiency.links_inside``.
        """
        return self.inside_bytes_per_second * self.efficiency.links_inside

    @property
    def nic_rate(self) -> float:
        """The bytes per second in one direction that one network adapter (NIC) of a GPU reaches.

        They are the declared rate times ``efficiency.links_across``.
        """
        return self.across_bytes_per_second * self.efficiency.links_across


_SOURCES = {
    "a100": "peak, memory and NVLink: NVIDIA A100 datasheet (nvidia.com/content/dam/en-zz/"
    "Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf), quoted by "
    "glennklockwood.com/garden/processors/A100. Not checked: the NIC of DGX A100, 200 Gbit/s",
    "h100": "peak, memory and NVLink: NVIDIA H100 datasheet, quoted by "
    "glennklockwood.com/garden/processors/h100, which doubts the memory bandwidth. Not checked: "
    "the NIC of DGX H100, 400 Gbit/s. With the assumed efficiencies, predictions of FSDP on H100 "
    "were up to 31 % faster than published runs (docs/concepts/planner-validation.md)",
    "h200": "memory size, NVLink and NIC: NVIDIA's submission to MLPerf inference "
    "(github.com/mlcommons/inference_results_v4.1, closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json). Not checked: the memory bandwidth, and the peak, which is "
    "that of H100",
    "h800": "NVLink: 200 GB/s in each direction, of which 160 GB/s are used (arXiv 2412.19437, "
    "section 3.2.2). Not checked: all other figures, which are those of H100",
    "b200": "memory size, NVLink and type of NIC (ConnectX-7): NVIDIA DGX B200 user guide "
    "(docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html). Peak and memory "
    "bandwidth: NVIDIA datasheet, quoted by glennklockwood.com/garden/processors/B200. Not "
    "checked: the NIC's 400 Gbit/s",
}
"""The sources of the figures of each preset, and the figures that are not checked."""


LARGEST_GEMM_SHARES = {"a100": 0.859, "h100": 0.801}
"""The fraction of the dense bfloat16 peak that the fastest GEMM reaches, by name of the preset.

Source: Bekman, Machine Learning Engineering, MAMF.
"""
SUSTAINED_SHARE = 0.9
"""The fraction of the fastest GEMM's FLOP/s that a GPU sustains in a long training.

It is calibrated to published runs.
"""


def _preset(name: str, memory: float, memory_rate: float, nvlink: float, nic: float) -> Hardware:
    """Return the hardware of a preset, in which every GPU has its own network adapter (NIC).

    All figures are those of one GPU. ``memory`` is in bytes. ``memory_rate``, ``nvlink`` and
    ``nic`` are in bytes per second, the last two in one direction.
    """
    peak = find_datasheet_peak(
        {"h100": "H100 SXM5", "h800": "H100 SXM5"}.get(name, name), "bfloat16"
    )
    assert peak is not None
    return Hardware(
        name=name,
        source=_SOURCES[name],
        flops_per_second=peak,
        memory_bytes=memory,
        memory_bytes_per_second=memory_rate,
        inside_bytes_per_second=nvlink,
        across_bytes_per_second=nic,
        efficiency=Efficiency(gemm=SUSTAINED_SHARE * LARGEST_GEMM_SHARES.get(name, 0.801)),
    )


PRESETS = {
    "a100": _preset("a100", 80e9, 2.039e12, 300e9, 25e9),
    "h100": _preset("h100", 80e9, 3.35e12, 450e9, 50e9),
    "h800": _preset("h800", 80e9, 3.35e12, 200e9, 50e9),
    "h200": _preset("h200", 141e9, 4.8e12, 450e9, 50e9),
    "b200": _preset("b200", 180e9, 8e12, 900e9, 50e9),
}
"""The known hardware by name: nodes of 8 GPUs with one network adapter per GPU."""


def load_hardware(text: str) -> Hardware:
    """Return the preset with the name ``text``, or the hardware in the ``.toml`` file ``text``.

    The keys of the file are the fields of ``Hardware``. Raises ``UserError`` for other names.
    """
    if text.endswith(".toml"):
        path = Path(text)
        return read_toml(path, "hardware file", Hardware, name=path.stem, source=text)
    if text.lower() not in PRESETS:
        choices = format_list([*PRESETS, "a file ending in .toml"])
        raise UserError(f"hardware {text!r} is not known: choose {choices}")
    return PRESETS[text.lower()]
