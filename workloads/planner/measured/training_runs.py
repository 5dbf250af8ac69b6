"""Training runs that others published, each predicted from its mesh, batch and recomputation alone. Pure.

Quoted numbers are the papers'; predicted ones are those of the presets with their assumed shares, none fitted to a row.
What a source does not tell is taken to be microbatches of one sequence and 1F1B.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from parbench.bench.results.details import Published
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import Shape
from parbench.workloads.planner.budget import Budget
from parbench.workloads.planner.candidates import splits
from parbench.workloads.planner.dry_run import DryRun, dry_run
from parbench.workloads.planner.hardware import OVERLAP, PRESETS, Hardware
from parbench.workloads.planner.models import model_of

A100, H100 = PRESETS["a100"], PRESETS["h100"]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run as its source tells it; ``measure`` is what of a predicted step is held against ``quoted``."""

    name: str
    spec: StepSpec
    hardware: Hardware
    quoted: float
    unit: str
    measure: Callable[[DryRun], float]
    source: str

    @property
    def predicted(self) -> DryRun:
        return dry_run(self.spec, self.hardware)

    @property
    def published(self) -> Published:
        return Published(
            name=f"{self.name}, {self.spec.world} GPUs, {self.spec.mesh_text}",
            quoted=self.quoted,
            predicted=self.measure(self.predicted),
            unit=self.unit,
            source=self.source,
        )


def executed_teraflops(run: DryRun) -> float:
    """Return TFLOP/s of one GPU by 96 B s l h^2 (1 + s/6h + V/16lh), a fourth of it recomputed (arXiv 2104.04473)."""
    shape, spec = run.spec.shape, run.spec
    h, s, layers = shape.hidden, shape.sequence, shape.layers
    flops = 96 * spec.tokens * layers * h**2 * (1 + s / (6 * h) + shape.vocabulary / (16 * layers * h))
    return flops / run.seconds / spec.world / 1e12


def model_teraflops(run: DryRun) -> float:
    return run.model_flops_per_second / 1e12


def tokens_per_gpu(run: DryRun) -> float:
    return run.tokens_per_second / run.spec.world


def masked_teraflops(run: DryRun) -> float:
    """Return model TFLOP/s of one GPU, attention counted as a causal mask leaves it."""
    shape, spec = run.spec.shape, run.spec
    masked = 6.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
    flops = flops_per_token(shape, spec.moe) - masked
    return run.tokens_per_second * flops / spec.world / 1e12


def training_runs() -> Iterator[TrainingRun]:
    return chain(_megatron(), _selective(), _llama(), _torchtitan(), _others(), [_deepseek()])


def _megatron() -> Iterator[TrainingRun]:
    """GPTs of 1.7 B to 1 T on Selene, every layer computed again."""
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
        shape = Shape("gpt", layers, hidden, heads, heads, 4 * hidden, 2048, 51200)
        step = StepSpec(name=f"gpt-{billions:g}b", shape=shape, checkpointing="full")
        yield TrainingRun(
            name=f"GPT {billions:g} B",
            spec=step.on({"dp": gpus // tp // pp, "pp": pp, "tp": tp}).with_batch(batch),
            hardware=A100,
            quoted=quoted,
            unit="TFLOP/s",
            measure=executed_teraflops,
            source="arXiv 2104.04473, table 1",
        )


def _selective() -> Iterator[TrainingRun]:
    """GPTs with sequence parallelism and selective recomputation, one replica each; the largest are interleaved."""
    for billions, heads, hidden, layers, pp, chunks, microbatch, batch, quoted in (
        (22, 64, 6144, 48, 1, 1, 4, 4, 0.415),
        (175, 96, 12288, 96, 8, 3, 1, 64, 0.514),
        (530, 128, 20480, 105, 35, 3, 1, 280, 0.560),
        (1000, 160, 25600, 128, 64, 1, 1, 512, 0.563),
    ):
        shape = Shape("gpt", layers, hidden, heads, heads, 4 * hidden, 2048, 51200)
        step = StepSpec(
            name=f"gpt-{billions}b",
            shape=shape,
            checkpointing="selective",
            microbatch=microbatch,
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks if chunks > 1 else 0,
        )
        yield TrainingRun(
            name=f"GPT {billions} B, selective",
            spec=step.on({"pp": pp, "tp": 8}).with_batch(batch),
            hardware=A100,
            quoted=quoted * A100.flops_per_second / 1e12,
            unit="TFLOP/s",
            measure=model_teraflops,
            source="arXiv 2205.05198, table 5 (MFU)",
        )


def _llama() -> Iterator[TrainingRun]:
    """Llama 3 405B: 126 layers on ranks of seven stages; there eight, of which the first and the last have no layer.

    Its FSDP keeps parameters gathered, which is ZeRO-1 here but for the gradients.
    """
    step = replace(model_of("llama3-405b"), schedule="interleaved", chunks=7, zero1="reduce_scatter")
    split = splits(step.shape, None, 16, 7, "interleaved")[-1]
    for gpus, cp, sequence, batch, quoted in (
        (8192, 1, 8192, 2048, 430),
        (16384, 1, 8192, 2048, 400),
        (16384, 16, 131072, 128, 380),
    ):
        sized = replace(step, shape=replace(step.shape, sequence=sequence), split=split, cp_method="allgather_kv")
        mesh = {"dp": gpus // 128 // cp, "pp": 16, "cp": cp, "tp": 8}
        yield TrainingRun(
            name=f"Llama 3 405B, {sequence} tokens",
            spec=sized.on(mesh).with_batch(batch),
            hardware=H100,
            quoted=quoted,
            unit="TFLOP/s",
            measure=masked_teraflops,
            source="arXiv 2407.21783, table 4",
        )


def _torchtitan() -> Iterator[TrainingRun]:
    """Llama 2 and 3 under FSDP on 64 A100; one layer in two recomputed is its ``selective layer``."""
    llama2 = {
        "llama2-13b": Shape("llama", 40, 5120, 40, 40, 13824, 4096, 32000),
        "llama2-70b": Shape("llama", 80, 8192, 64, 8, 28672, 4096, 32000),
    }
    steps = {name: StepSpec(name=name, shape=shape) for name, shape in llama2.items()}
    for name, microbatch, how, quoted in (
        ("llama3-8b", 1, "full:2", 2904),
        ("llama3-8b", 1, "selective", 2973),
        ("llama3-70b", 1, "full", 331),
        ("llama2-13b", 2, "none", 2162),
        ("llama2-13b", 2, "full:2", 1914),
        ("llama2-70b", 1, "selective", 355),
        ("llama2-70b", 2, "full", 353),
    ):
        step = steps.get(name) or model_of(name)
        yield TrainingRun(
            name=f"{name}, {how}, microbatch {microbatch}",
            spec=replace(step.on({"fsdp": 64}).checkpointed(how), microbatch=microbatch),
            hardware=A100,
            quoted=quoted,
            unit="tokens/s a GPU",
            measure=tokens_per_gpu,
            source="github.com/pytorch/torchtitan, docs/performance.md, 2024",
        )


def _others() -> Iterator[TrainingRun]:
    """BLOOM, whose nodes have four links of 100 Gbit/s; Nemotron-4; Llama 3 70B by NeMo's FSDP; MPT."""
    jean_zay = msgspec.structs.replace(A100, name="jean-zay", across_bytes_per_second=4 * 12.5e9 / 8)
    bloom = StepSpec(name="bloom", shape=Shape("gpt", 70, 14336, 112, 112, 57344, 2048, 250880), microbatch=2)
    split = splits(bloom.shape, None, 12, 1, "1f1b")[-1]
    mesh = {"dp": 8, "pp": 12, "tp": 4}
    yield TrainingRun(
        name="BLOOM 176B",
        spec=replace(bloom, checkpointing="full", split=split, zero1="reduce_scatter").on(mesh).with_batch(2048),
        hardware=jean_zay,
        quoted=156,
        unit="TFLOP/s",
        measure=executed_teraflops,
        source="arXiv 2211.05100, section 3.4",
    )
    nemotron = StepSpec(
        name="nemotron-4-340b",
        shape=Shape("gpt", 96, 18432, 96, 8, 73728, 4096, 256000),
        schedule="interleaved",
        chunks=8,
        zero1="reduce_scatter",
        checkpointing="selective",
    )
    yield TrainingRun(
        name="Nemotron-4 340B, batch 2304",
        spec=nemotron.on({"dp": 64, "pp": 12, "tp": 8}).with_batch(2304),
        hardware=H100,
        quoted=8.0,
        unit="s",
        measure=lambda run: run.seconds,
        source="arXiv 2406.11704, table 2",
    )
    spec = replace(model_of("llama3-70b"), checkpointing="full").on({"fsdp": 32, "cp": 2}).with_batch(128)
    yield TrainingRun(
        name="llama3-70b, full, NeMo AutoModel",
        spec=spec,
        hardware=H100,
        quoted=866.8,
        unit="tokens/s a GPU",
        measure=tokens_per_gpu,
        source="docs.nvidia.com/nemo/automodel, performance summary",
    )
    for size, layers, hidden, microbatch, microbatches, how, quoted in (
        ("70b", 80, 8192, 8, 4, "full", 421.3),
        ("13b", 40, 5120, 2, 1, "none", 394.4),
    ):
        shape = Shape("gpt", layers, hidden, hidden // 128, hidden // 128, 4 * hidden, 2048, 50368)
        mpt = StepSpec(name=f"mpt-{size}", shape=shape, microbatch=microbatch, microbatches=microbatches)
        yield TrainingRun(
            name=f"MPT {size}, {how}, microbatch {microbatch}",
            spec=mpt.on({"fsdp": 64}).checkpointed(how),
            hardware=H100,
            quoted=quoted,
            unit="TFLOP/s",
            measure=model_teraflops,
            source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking, H100 BF16",
        )


def _deepseek() -> TrainingRun:
    """DeepSeek-V3, whose tokens travel beside another microbatch's compute; its products are of 8 bits, these of 16.

    61 layers on 16 ranks; what it computes again, norms and up-projections, is less than layers.
    """
    h800 = PRESETS["h800"]
    hidden = msgspec.structs.replace(h800.efficiency, overlap=OVERLAP | {"ep": OVERLAP["edp"]})
    step = model_of("deepseek-v3", 4096)
    split = splits(step.shape, step.moe, 16, 1, "1f1b")[-1]
    spec = replace(step, split=split, checkpointing="selective", zero1="reduce_scatter")
    return TrainingRun(
        name="DeepSeek-V3, dispatch hidden, FP8 not in a plan",
        spec=spec.on({"pp": 16, "dp": 128, "ep": 64}).with_batch(15360),
        hardware=msgspec.structs.replace(h800, efficiency=hidden),
        quoted=180e3,
        unit="GPU-hours a T tokens",
        measure=lambda run: Budget(run=run, tokens=1e12).gpu_hours,
        source="arXiv 2412.19437, table 1 and section 3",
    )
