"""What others published beside what this planner says of it: the shape must come out, not the digit. Pure.

Quoted numbers are those of the papers, predicted ones computed here. What a paper does not tell is declared:

* ``SELENE`` are A100 nodes with eight 200 Gbit/s cards. A ZeRO-3 collective drives one of them (``rails`` = 1), as if
  each ring left its node over one card: with all eight ZeRO-3 would hide its bytes even at 1,536 GPUs.
* The playbook draws tokens/s a GPU of "a 3B model" over tensor parallel sizes, each bar's drop against the bar of half
  as many GPUs: once without and once, at 4,096 tokens, with sequence parallelism, which the planner assumes. Layers,
  hidden size and batch are not told: here a gpt of about as many parameters and one sequence.
"""

from dataclasses import replace

import msgspec

from parbench.bench.results.details import Published
from parbench.workloads.costs.memory import state_bytes
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import Shape
from parbench.workloads.pipeline_parallel.bubbles import bubble_fraction, bubble_fraction_span
from parbench.workloads.pipeline_parallel.schedules import make_schedule
from parbench.workloads.pipeline_parallel.simulation import simulate_even
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.measured.training_runs import executed_teraflops, training_runs
from parbench.workloads.planner.models import model_of

SELENE = msgspec.structs.replace(PRESETS["a100"], name="selene", rails=1)
_THREE_BILLION = Shape("gpt", 28, 3072, 32, 32, 12288, 4096, 49152)
ASSUMED = (
    "Assumed for the drops of tensor parallelism, whose source tells 3 B parameters and, where sequences are split too "
    f"(SP), 4096 tokens: a gpt of {_THREE_BILLION.layers} layers, hidden size {_THREE_BILLION.hidden}, one sequence of "
    f"{_THREE_BILLION.sequence} tokens, on h100, with sequence parallelism against both figures."
)


def published() -> list[Published]:
    runs = [run.published for run in training_runs()]
    return [*zero_memory(), *bubbles(), *tensor_drops(), *scaling(), *runs]


def zero_memory() -> list[Published]:
    """Return ZeRO's state of 7.5 billion parameters on 64 ranks, mixed precision: which of it each stage shards."""
    whole = state_bytes(7.5e9)
    parts = (whole.optimizer, whole.gradients, whole.parameters)
    return [
        Published(
            name=f"ZeRO memory, 7.5 B, 64 ranks: {name}",
            quoted=gigabytes,
            predicted=(sum(parts[:stage]) / 64 + sum(parts[stage:])) / 1e9,
            unit="GB",
            source="arXiv 1910.02054, figure 1",
        )
        for stage, (name, gigabytes) in enumerate({"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.88}.items())
    ]


def bubbles() -> list[Published]:
    """Return bubbles as shares of the whole at F = I = W, 4 ranks and 8 microbatches, simulated action by action."""
    found = []
    for name, chunks, share, source in (
        ("gpipe", 0, 3 / 11, "arXiv 2104.04473, its formula"),
        ("1f1b", 0, 3 / 11, "arXiv 2104.04473, its formula"),
        ("interleaved", 2, 1.5 / 9.5, "arXiv 2104.04473, its formula"),
        ("interleaved", 4, 0.75 / 8.75, "arXiv 2104.04473, its formula"),
        ("zb_h1", 0, 1 / 9, "arXiv 2401.10241, its formula"),
        ("zb_v", 0, 0.0, "zero by design, in a rank's own span"),
    ):
        timeline = simulate_even(make_schedule(name, ranks=4, microbatches=8, chunks=chunks))
        predicted = (bubble_fraction_span if name == "zb_v" else bubble_fraction)(timeline)
        what = f"bubble, P = 4, M = 8, F = I = W: {name}" + (f" v={chunks}" if chunks else "")
        found.append(Published(name=what, quoted=share, predicted=predicted, unit="", source=source))
    return found


def tensor_drops() -> list[Published]:
    """Return how much throughput a GPU loses where tensor parallelism doubles, inside an 8-GPU node and beyond it."""
    sizes = (2, 4, 8, 16, 32)
    specs = [StepSpec(name="gpt-3b", shape=_THREE_BILLION, mesh={"tp": tp}) for tp in sizes]
    rates = {spec.world: dry_run(spec, PRESETS["h100"]).tokens_per_second / spec.world for spec in specs}
    figures = {"TP (3B Model)": (-0.108, -0.122, -0.427, -0.656), "TP/SP (3B Model)": (-0.05, -0.191, -0.434, -0.414)}
    return [
        Published(
            name=f"tokens/s a GPU, {figure}: tp={tp} against tp={tp // 2}",
            quoted=quoted,
            predicted=rates[tp] / rates[tp // 2] - 1,
            unit="",
            source="Hugging Face, The Ultra-Scale Playbook; the model assumed",
        )
        for figure, drops in figures.items()
        for tp, quoted in zip(sizes[1:], drops, strict=True)
    ]


def scaling() -> list[Published]:
    """Return TFLOP/s a GPU of 175 B at a global batch of 1,536: ZeRO-3, and tensor 8 x pipeline 12 x data parallel.

    Megatron counts what is executed, recomputation included. ZeRO-3's microbatch is the batch over the GPUs: 4, 2, 1.
    """
    step, gpus = replace(model_of("gpt-175b"), checkpointing="full"), (384, 768, 1536)
    specs = {
        "ZeRO-3": [step.on({"fsdp": n}, microbatch=1536 // n) for n in gpus],
        "TP+PP+DP": [step.on({"dp": n // 96, "pp": 12, "tp": 8}).with_batch(1536) for n in gpus],
    }
    quoted = {"ZeRO-3": (144.0, 88.0, 44.0), "TP+PP+DP": (153.0, 149.0, 141.0)}
    return [
        Published(
            name=f"175 B, batch 1,536, TFLOP/s a GPU: {name}, {spec.world} GPUs",
            quoted=rate,
            predicted=executed_teraflops(dry_run(spec, SELENE)),
            unit="TFLOP/s",
            source="arXiv 2104.04473, table 2",
        )
        for name, rates in quoted.items()
        for spec, rate in zip(specs[name], rates, strict=True)
    ]
