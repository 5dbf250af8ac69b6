"""Training runs as their sources publish them: model, mesh, batch, hardware and result.

No constant belongs to a row. Every run uses a hardware preset, or one that differs as its source
says. Where a source gives no microbatch or schedule, the microbatch is one sequence and the
schedule is 1F1B.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from parbench.workloads.costs.flops import count_flops_per_token
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.pipeline_case import PipelineOptions
from parbench.workloads.planner.candidates import balance_layers, place_step
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import OVERLAP, PRESETS, Hardware
from parbench.workloads.planner.models import load_model

A100, H100 = PRESETS["a100"], PRESETS["h100"]
# Before FlashAttention a forward pass moves 13 bytes per score: the product, its softmax, and their
# dropout with a mask are written and read.
MEGATRON = msgspec.structs.replace(
    A100,
    name="a100",
    efficiency=msgspec.structs.replace(A100.efficiency, score_traffic=13.0),
)
# A ZeRO-3 collective uses one of the eight 200 Gbit/s NICs of a Selene node.
SELENE_ONE_CARD = msgspec.structs.replace(MEGATRON, name="selene", rails=1)
# A power limit of 500 W instead of 700 W lowers the clocks by about a tenth.
GRAND_TETON = msgspec.structs.replace(
    H100,
    name="grand-teton",
    memory_bytes=96e9,
    memory_bytes_per_second=2.4e12,
    flops_per_second=0.9 * H100.flops_per_second,
)
# The nodes of Jean Zay have four links of 100 Gbit/s for eight GPUs.
JEAN_ZAY = msgspec.structs.replace(
    MEGATRON, name="jean-zay", across_bytes_per_second=4 * 12.5e9 / 8
)


@dataclass(frozen=True)
class Metric:
    """A published quantity: its unit, and how to compute it from a predicted step."""

    unit: str
    compute: Callable[[DryRun], float]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A published result next to the planner's prediction for the same mesh and hardware."""

    name: str
    spec: StepSpec
    hardware: Hardware
    quoted: float
    metric: Metric
    source: str

    @cached_property
    def step(self) -> DryRun:
        return dry_run(self.spec, self.hardware)

    @property
    def predicted(self) -> float:
        return self.metric.compute(self.step)

    @property
    def error(self) -> float:
        """The relative error of the prediction, predicted / quoted - 1."""
        return self.predicted / self.quoted - 1


def compute_executed_teraflops(step: DryRun) -> float:
    """Compute TFLOP/s per GPU with full recomputation.

    They are 96 B s l h^2 (1 + s/6h + V/16lh) (arXiv 2104.04473).
    """
    spec, shape = step.spec, step.spec.shape
    h, layers = shape.hidden, shape.layers
    attention = shape.sequence / (6 * h)
    head = shape.vocabulary / (16 * layers * h)
    flops = 96 * spec.tokens * layers * h**2 * (1 + attention + head)
    return flops / step.seconds / spec.ranks / 1e12


def compute_masked_teraflops(step: DryRun) -> float:
    """Compute model TFLOP/s per GPU with the half of attention that a causal mask leaves."""
    shape, spec = step.spec.shape, step.spec
    masked_flops = 6.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
    flops = count_flops_per_token(shape, spec.moe) - masked_flops
    return step.tokens_per_second * flops / spec.ranks / 1e12


EXECUTED_TERAFLOPS = Metric("TFLOP/s", compute_executed_teraflops)
MASKED_TERAFLOPS = Metric("TFLOP/s", compute_masked_teraflops)
MODEL_TERAFLOPS = Metric("TFLOP/s", lambda step: step.model_flops_per_second / 1e12)
TOKENS_PER_GPU = Metric("tokens/s/GPU", lambda step: step.tokens_per_second / step.spec.ranks)
STEP_SECONDS = Metric("s", lambda step: step.seconds)
GPU_HOURS = Metric(
    "GPU h/T tokens", lambda step: 1e12 / step.tokens_per_second * step.spec.ranks / 3600
)


def load_training_runs() -> list[TrainingRun]:
    return [
        *_megatron(),
        *_scaling(),
        *_selective(),
        *_llama3_405b(),
        *_torchtitan(),
        *_torchtitan_h100(),
        *_mpt(),
        _bloom(),
        _nemotron(),
        _nemo_llama3(),
        _deepseek(),
    ]


def _gpt_shape(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Shape:
    return Shape("gpt", layers, hidden, heads, heads, 4 * hidden, 2048, vocabulary)


def _megatron() -> Iterator[TrainingRun]:
    """GPTs of 1.7 B to 1 T parameters on Selene with full recomputation."""
    for billions, heads, hidden, layers, tp, pp, gpus, batch, quoted in (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    ):
        step = StepSpec(
            name="gpt", shape=_gpt_shape(layers, hidden, heads), checkpointing="full"
        )
        yield TrainingRun(
            name=f"GPT {billions:g} B",
            spec=place_step(step, ParallelDims(dp=gpus // tp // pp, pp=pp, tp=tp)).with_batch(
                batch
            ),
            hardware=MEGATRON,
            quoted=quoted,
            metric=EXECUTED_TERAFLOPS,
            source="arXiv 2104.04473, table 1",
        )


def _scaling() -> Iterator[TrainingRun]:
    """GPT 175 B at a global batch of 1,536: ZeRO-3, and tensor 8 x pipeline 12 x data parallel."""
    step = replace(load_model("gpt-175b"), checkpointing="full")
    for gpus, zero3_quoted, pipeline_quoted in (
        (384, 144, 153),
        (768, 88, 149),
        (1536, 44, 141),
    ):
        yield TrainingRun(
            name="GPT 175 B, ZeRO-3",
            spec=replace(place_step(step, ParallelDims(fsdp=gpus)), microbatch=1536 // gpus),
            hardware=SELENE_ONE_CARD,
            quoted=zero3_quoted,
            metric=EXECUTED_TERAFLOPS,
            source="arXiv 2104.04473, table 2",
        )
        yield TrainingRun(
            name="GPT 175 B",
            spec=place_step(step, ParallelDims(dp=gpus // 96, pp=12, tp=8)).with_batch(1536),
            hardware=SELENE_ONE_CARD,
            quoted=pipeline_quoted,
            metric=EXECUTED_TERAFLOPS,
            source="arXiv 2104.04473, table 2",
        )


def _selective() -> Iterator[TrainingRun]:
    """GPTs with sequence parallelism and selective recomputation, one replica each."""
    for billions, heads, hidden, layers, pp, virtual_stages, microbatch, batch, quoted_mfu in (
        (22, 64, 6144, 48, 1, 1, 4, 4, 0.415),
        (175, 96, 12288, 96, 8, 3, 1, 64, 0.514),
        (530, 128, 20480, 105, 35, 3, 1, 280, 0.560),
        (1000, 160, 25600, 128, 64, 1, 1, 512, 0.563),
    ):
        interleaved = virtual_stages > 1
        step = StepSpec(
            name="gpt",
            shape=_gpt_shape(layers, hidden, heads),
            microbatch=microbatch,
            pipeline_options=PipelineOptions(
                schedule="interleaved" if interleaved else "1f1b",
                stages_per_rank=virtual_stages if interleaved else 0,
            ),
        )
        yield TrainingRun(
            name=f"GPT {billions} B",
            spec=place_step(step, ParallelDims(pp=pp, tp=8)).with_batch(batch),
            hardware=MEGATRON,
            quoted=quoted_mfu * A100.flops_per_second / 1e12,
            metric=MODEL_TERAFLOPS,
            source="arXiv 2205.05198, table 5 (MFU)",
        )


def _llama3_405b() -> Iterator[TrainingRun]:
    """Llama 3 405B. Its FSDP does not reshard parameters, so ZeRO-1 is the closest plan.

    The source has eight stages per rank, of which the first and the last rank leave one without
    layers. Here 126 layers are split over seven stages per rank.
    """
    options = PipelineOptions(schedule="interleaved", stages_per_rank=7)
    step = replace(
        load_model("llama3-405b"), pipeline_options=options, zero1="distributed", fused=True
    )
    split = balance_layers(step.shape, None, 16, 7, "interleaved")
    for gpus, cp, sequence, batch, quoted in (
        (8192, 1, 8192, 2048, 430),
        (16384, 1, 8192, 2048, 400),
        (16384, 16, 131072, 128, 380),
    ):
        shape = replace(step.shape, sequence=sequence)
        mesh = {"dp": gpus // 128 // cp, "pp": 16, "cp": cp, "tp": 8}
        spec = place_step(
            replace(step, shape=shape, cp_method="allgather_kv").with_pipeline(
                layers_per_stage=split
            ),
            ParallelDims().resize(**mesh),
        )
        yield TrainingRun(
            name=f"Llama 3 405B, {sequence} tokens",
            spec=spec.with_batch(batch),
            hardware=H100,
            quoted=quoted,
            metric=MASKED_TERAFLOPS,
            source="arXiv 2407.21783, table 4",
        )


def _torchtitan() -> Iterator[TrainingRun]:
    """Llama 2 and 3 with FSDP on 64 A100s.

    ``full:2`` is torchtitan's selective layer recomputation.
    """
    shapes = {
        "llama2-13b": Shape("llama", 40, 5120, 40, 40, 13824, 4096, 32000),
        "llama2-70b": Shape("llama", 80, 8192, 64, 8, 28672, 4096, 32000),
    }
    for model, microbatch, checkpointing, quoted in (
        ("llama3-8b", 1, "full:2", 2904),
        ("llama3-8b", 1, "selective", 2973),
        ("llama3-70b", 1, "full", 331),
        ("llama2-13b", 2, "none", 2162),
        ("llama2-13b", 2, "full:2", 1914),
        ("llama2-70b", 1, "selective", 355),
        ("llama2-70b", 2, "full", 353),
    ):
        step = (
            StepSpec(name=model, shape=shapes[model]) if model in shapes else load_model(model)
        )
        spec = place_step(step, ParallelDims(fsdp=64)).with_checkpointing(checkpointing)
        yield TrainingRun(
            name=model,
            spec=replace(spec, microbatch=microbatch),
            hardware=A100,
            quoted=quoted,
            metric=TOKENS_PER_GPU,
            source="torchtitan, docs/performance.md, 2024",
        )


def _torchtitan_h100() -> Iterator[TrainingRun]:
    """Llama 3.1 8B with FSDP, eager and compiled, on H100s of 96 GB with a limit of 500 W."""
    for gpus, fused, quoted in (
        (8, False, 5762),
        (8, True, 6667),
        (128, False, 5605),
        (128, True, 6514),
    ):
        spec = place_step(load_model("llama3-8b"), ParallelDims(fsdp=gpus))
        yield TrainingRun(
            name=f"llama3-8b, {'compiled' if fused else 'eager'}",
            spec=replace(spec, microbatch=2, checkpointing="selective", fused=fused),
            hardware=GRAND_TETON,
            quoted=quoted,
            metric=TOKENS_PER_GPU,
            source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
        )


def _mpt() -> Iterator[TrainingRun]:
    for name, layers, hidden, microbatch, microbatches, checkpointing, quoted in (
        ("MPT 70B", 80, 8192, 8, 4, "full", 421.3),
        ("MPT 13B", 40, 5120, 2, 1, "none", 394.4),
    ):
        shape = _gpt_shape(layers, hidden, hidden // 128, vocabulary=50368)
        step = StepSpec(
            name=name,
            shape=shape,
            microbatch=microbatch,
            microbatches=microbatches,
        )
        yield TrainingRun(
            name=name,
            spec=place_step(step, ParallelDims(fsdp=64)).with_checkpointing(checkpointing),
            hardware=H100,
            quoted=quoted,
            metric=MODEL_TERAFLOPS,
            source="llm-foundry, scripts/train/benchmarking, H100 BF16",
        )


def _bloom() -> TrainingRun:
    step = StepSpec(
        name="bloom", shape=_gpt_shape(70, 14336, 112, vocabulary=250880), microbatch=2
    )
    split = balance_layers(step.shape, None, 12, 1, "1f1b")
    step = replace(step, checkpointing="full", zero1="distributed").with_pipeline(
        layers_per_stage=split
    )
    return TrainingRun(
        name="BLOOM 176B",
        spec=place_step(step, ParallelDims(dp=8, pp=12, tp=4)).with_batch(2048),
        hardware=JEAN_ZAY,
        quoted=156,
        metric=EXECUTED_TERAFLOPS,
        source="arXiv 2211.05100, section 3.4",
    )


def _nemotron() -> TrainingRun:
    step = StepSpec(
        name="nemotron-4-340b",
        shape=Shape("gpt", 96, 18432, 96, 8, 73728, 4096, 256000),
        pipeline_options=PipelineOptions(schedule="interleaved", stages_per_rank=8),
        zero1="distributed",
    )
    return TrainingRun(
        name="Nemotron-4 340B",
        spec=place_step(step, ParallelDims(dp=64, pp=12, tp=8)).with_batch(2304),
        hardware=H100,
        quoted=8.0,
        metric=STEP_SECONDS,
        source="arXiv 2406.11704, table 2",
    )


def _nemo_llama3() -> TrainingRun:
    step = replace(load_model("llama3-70b"), checkpointing="full")
    return TrainingRun(
        name="llama3-70b, NeMo AutoModel",
        spec=place_step(step, ParallelDims(fsdp=32, cp=2)).with_batch(128),
        hardware=H100,
        quoted=866.8,
        metric=TOKENS_PER_GPU,
        source="docs.nvidia.com/nemo/automodel, performance summary",
    )


def _deepseek() -> TrainingRun:
    """DeepSeek-V3 with its dispatch hidden behind another microbatch.

    Its FP8 products are bfloat16 here.
    """
    h800 = PRESETS["h800"]
    efficiency = msgspec.structs.replace(
        h800.efficiency, overlap=OVERLAP | {"ep": OVERLAP["edp"]}
    )
    step = load_model("deepseek-v3", 4096)
    split = balance_layers(step.shape, step.moe, 16, 1, "1f1b")
    step = replace(step, checkpointing="selective", zero1="distributed")
    step = step.with_pipeline(layers_per_stage=split)
    return TrainingRun(
        name="DeepSeek-V3",
        spec=place_step(step, ParallelDims.parse("pp=16,dp=128,ep=64")).with_batch(15360),
        hardware=msgspec.structs.replace(h800, efficiency=efficiency),
        quoted=180e3,
        metric=GPU_HOURS,
        source="arXiv 2412.19437, table 1 and section 3",
    )
