"""The seconds that a rank computes for one microbatch, kernel by kernel. Pure.

A GEMM of (m, k) and (k, n) takes its FLOPs at the rate of large GEMMs, the time to move its
operands, and a launch. Its efficiency therefore falls as m, n or k get small. Attention has a rate
of its own. Norms, activation functions, residuals and the loss take the time to move their bytes.
"""

from dataclasses import dataclass

from parbench.workloads.costs.flops import (
    ATTENTION_BACKWARD,
    MATMUL_BACKWARD,
    count_attention_flops,
    is_recomputed_gemm,
)
from parbench.workloads.costs.parameter_table import ParameterPart, Parts, list_units
from parbench.workloads.costs.step_spec import RankView, StepSpec
from parbench.workloads.planner.hardware import Hardware

ELEMENTWISE_BACKWARD = 2.0
"""The bytes that elementwise kernels move in the backward pass, relative to the forward pass.

They are more, because the kernels also move gradients.
"""
ELEMENTWISE_KERNELS = 12
"""The number of kernels in a layer's forward pass that are neither GEMMs nor attention.

With fused kernels it is half as large.
"""
LOSS_BYTES = 30
"""The bytes that the float32 loss and its gradient move for each logit."""


@dataclass(frozen=True, kw_only=True)
class ComputeSeconds:
    """The seconds of compute for one microbatch on one rank, or in one of its layers."""

    forward: float
    """The seconds of the forward pass."""
    backward: float
    """The seconds of the backward pass, with recomputation."""
    attention: float
    """The seconds of attention in both passes. ``forward`` and ``backward`` include them."""

    def scale_to(self, seconds: float) -> "ComputeSeconds":
        """Return the same compute if both passes together take ``seconds``."""
        factor = seconds / (self.forward + self.backward)
        return ComputeSeconds(
            forward=factor * self.forward,
            backward=factor * self.backward,
            attention=factor * self.attention,
        )


@dataclass(frozen=True, kw_only=True)
class GemmShape:
    """Equal matrix multiplications of (m, k) by (k, n), which one kernel computes together."""

    m: float
    """The rows of the left matrix and of the result, usually tokens."""
    n: float
    """The columns of the right matrix and of the result."""
    k: float
    """The columns of the left matrix and the rows of the right one."""
    count: float = 1.0
    """The number of multiplications."""

    @property
    def flops(self) -> float:
        """The FLOPs of all multiplications of the kernel."""
        return 2.0 * self.count * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """The number of elements of both inputs and of the output, over all multiplications."""
        return self.count * (self.m * self.n + self.n * self.k + self.m * self.k)


def compute_gemm_seconds(gemm: GemmShape, hardware: Hardware, bytes_per_element: int) -> float:
    """Return the seconds of one GEMM kernel.

    They are the sum of the times of its launch, its FLOPs and its memory traffic. ``gemm`` may be
    several equal multiplications in one kernel, whose elements have ``bytes_per_element`` bytes.
    """
    efficiency = hardware.efficiency
    moved = efficiency.gemm_traffic * gemm.elements * bytes_per_element
    peak = hardware.peak(bytes_per_element)
    return (
        hardware.kernel_seconds
        + gemm.flops / (peak * efficiency.gemm)
        + moved / hardware.memory_rate
    )


def compute_microbatch(view: RankView, hardware: Hardware) -> ComputeSeconds:
    """Return the seconds of compute for one microbatch in all layers of a rank.

    On the rank with the head they include the head and the loss. The optimizer and communication
    are not included.
    """
    spec = view.spec
    units = list_units(view)
    forward = backward = attention = 0.0
    for count, parts in units.layers:
        if not count:
            continue
        layer = _compute_layer(view, parts, hardware)
        forward += count * layer.forward
        backward += count * layer.backward
        attention += count * layer.attention
    if view.has_head:
        head = GemmShape(
            m=spec.local_tokens, n=spec.shape.vocabulary / spec.dims.tp, k=spec.shape.hidden
        )
        seconds = compute_gemm_seconds(head, hardware, spec.bytes_per_element)
        loss = LOSS_BYTES * hardware.efficiency.elementwise_traffic * head.m * head.n
        forward += seconds
        backward += MATMUL_BACKWARD * seconds + loss / hardware.memory_rate
    return ComputeSeconds(forward=forward, backward=backward, attention=attention)


def _compute_layer(view: RankView, parts: Parts, hardware: Hardware) -> ComputeSeconds:
    """Return the seconds of compute for one microbatch in one layer of a rank.

    ``parts`` are the parameters of the layer. The backward pass includes recomputation. Its time is
    the mean over the rank's layers, of which some may not be recomputed.
    """
    spec = view.spec
    gemms = repeated_gemms = 0.0
    for part in parts:
        gemm = _make_gemm(spec, part)
        if gemm is None:
            continue
        seconds = compute_gemm_seconds(gemm, hardware, spec.bytes_per_element)
        gemms += seconds
        if is_recomputed_gemm(spec.shape, part.name):
            repeated_gemms += seconds
    attention = _compute_attention(spec, hardware)
    kernels = ELEMENTWISE_KERNELS / 2 if spec.fused else ELEMENTWISE_KERNELS
    moved = hardware.efficiency.elementwise_traffic * count_elementwise_bytes(spec, parts)
    elementwise = kernels * hardware.kernel_seconds + moved / hardware.memory_rate
    repeated = 0.0
    if spec.checkpointing == "full":
        repeated = gemms + attention + elementwise
    elif spec.checkpointing == "selective":
        repeated = repeated_gemms + elementwise
    return ComputeSeconds(
        forward=gemms + attention + elementwise,
        backward=MATMUL_BACKWARD * gemms
        + ATTENTION_BACKWARD * attention
        + ELEMENTWISE_BACKWARD * elementwise
        + repeated * view.recomputed_layers / view.layers,
        attention=attention * (1 + ATTENTION_BACKWARD),
    )


def _compute_attention(spec: StepSpec, hardware: Hardware) -> float:
    """Return the seconds of attention in a layer's forward pass, for one microbatch.

    A fused kernel skips the pairs of tokens that a causal mask excludes.
    """
    efficiency = hardware.efficiency
    tokens = spec.local_tokens / spec.dims.tp
    # Attention that is not fused computes the masked half as well.
    is_fused = not efficiency.score_traffic
    flops = count_attention_flops(spec.shape, is_causal=is_fused) * tokens
    scores = tokens * spec.shape.heads * spec.shape.sequence
    peak = hardware.peak(spec.bytes_per_element)
    return (
        hardware.kernel_seconds
        + flops / (peak * efficiency.attention)
        + scores * efficiency.score_traffic / hardware.memory_rate
    )


def _make_gemm(spec: StepSpec, part: ParameterPart) -> GemmShape | None:
    """Return the forward GEMM of a layer's parameter, for one microbatch on a rank.

    None for biases and for the parameters of norms, which are not in a GEMM.
    """
    if part.name.endswith("bias") or len(part.size) < 2:
        return None
    if part.kind == "routed":
        assert spec.moe is not None
        experts, k, n = part.size
        rows = spec.sharded_tokens * spec.moe.top_k * spec.dims.ep * spec.dims.etp
        return GemmShape(m=rows / spec.moe.experts, n=n, k=k, count=experts)
    n, k = part.size
    tokens = float(spec.local_tokens)
    if part.kind == "replicated":
        tokens /= spec.dims.tp
    return GemmShape(m=tokens, n=n, k=k)


def count_elementwise_bytes(spec: StepSpec, parts: Parts) -> float:
    """Return the bytes that kernels other than GEMMs and attention move in a layer's forward pass.

    They are of one microbatch on one rank. ``parts`` are the parameters of the layer.

    A norm reads and writes a tensor, a residual reads two and writes one. GELU reads and writes its
    tensor, SwiGLU in two kernels moves five. RoPE in float32 moves ten: queries and keys are read
    five times and written five times. Fused kernels move fewer tensors, because they keep the input
    of the next operation. RoPE then moves two: queries and keys are read once and written once.
    """
    shape = spec.shape
    is_llama = shape.recipe == "llama"
    has_experts = any(part.kind == "routed" for part in parts)
    rotated = shape.heads * shape.head_size + shape.kv_heads * shape.head_size
    between_blocks = 6.0 if spec.fused else 10.0
    inner = (3.0 if spec.fused else 5.0) if is_llama else 2.0
    rotations = (2.0 if spec.fused else 10.0) if is_llama else 0.0
    elements = between_blocks * spec.sharded_tokens * shape.hidden
    elements += spec.local_tokens / spec.dims.tp * rotations * rotated
    if has_experts and spec.moe is not None:
        rows = spec.sharded_tokens * (spec.moe.top_k + spec.moe.shared)
        elements += rows * (4 * shape.hidden + inner * spec.moe.expert_ffn)
    else:
        elements += spec.local_tokens / spec.dims.tp * inner * shape.ffn
    return elements * spec.bytes_per_element
