"""What others published beside what this planner says of it: the shape must come out, not the digit. Pure.

Quoted numbers are those of the papers, predicted ones computed here. What a paper does not tell is declared:

* ``SELENE`` are A100 nodes with eight 200 Gbit/s cards. A ZeRO-3 collective drives one of them (``rails`` = 1), as if
  each ring left its node over one card: with all eight ZeRO-3 would hide its bytes even at 1,536 GPUs.
* The model of the tensor-parallel drops is not known to us: a 3-billion-parameter gpt with sequences of 4,096 on H100s,
  drops against 8 ranks.
"""

from dataclasses import dataclass

import msgspec

from bench.results.details import Published
from workloads.costs.communication_pattern import state_bytes
from workloads.model.shapes import Shape
from workloads.pipeline_parallel.bubbles import bubble_fraction, bubble_fraction_span
from workloads.pipeline_parallel.schedules import make_schedule
from workloads.pipeline_parallel.simulate import simulate
from workloads.planner.ask import Ask
from workloads.planner.dry_run import DryRun, dry_run
from workloads.planner.hardware import PRESETS
from workloads.planner.models import Model, model_of

SELENE = msgspec.structs.replace(PRESETS["a100"], name="selene", rails=1)
_GPUS = (384, 768, 1536)
_BATCH = 1536


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One quoted number beside the predicted one."""

    group: str
    what: str
    quoted: float
    predicted: float
    unit: str
    source: str


def published() -> list[Published]:
    """Return all claims as ``plan.json`` keeps them, in their order."""
    return [
        Published(
            name=f"{claim.group}: {claim.what}",
            quoted=claim.quoted,
            predicted=claim.predicted,
            unit=claim.unit,
            source=claim.source,
        )
        for claim in claims()
    ]


def claims() -> tuple[Claim, ...]:
    """Return all of them."""
    return (*zero_memory(), *bubbles(), *tensor_drops(), *scaling())


def zero_memory() -> list[Claim]:
    """Return ZeRO's state of 7.5 billion parameters on 64 ranks, mixed precision."""
    quoted = {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.88}
    return [
        Claim(
            group="ZeRO memory, 7.5 B, 64 ranks",
            what=name,
            quoted=gigabytes,
            predicted=state_bytes(name, 7_500_000_000, 64, mixed=True).total / 1e9,
            unit="GB",
            source="arXiv 1910.02054, figure 1",
        )
        for name, gigabytes in quoted.items()
    ]


def bubbles() -> list[Claim]:
    """Return bubbles as shares of the whole at F = I = W, 4 ranks and 8 microbatches, simulated action by action."""
    quoted = (
        ("gpipe", 0, 3 / 11, "2104.04473"),
        ("1f1b", 0, 3 / 11, "2104.04473"),
        ("interleaved", 2, 1.5 / 9.5, "2104.04473"),
        ("interleaved", 4, 0.75 / 8.75, "2104.04473"),
        ("zb_h1", 0, 1 / 9, "2401.10241"),
        ("zb_v", 0, 0.0, ""),
    )
    found = []
    for name, chunks, share, paper in quoted:
        timeline = simulate(
            make_schedule(name, ranks=4, microbatches=8, chunks=chunks),
            lambda action: 2.0 if action.kind == "B" else 1.0,
        )
        measure = bubble_fraction_span if name == "zb_v" else bubble_fraction
        found.append(
            Claim(
                group="bubble, P = 4, M = 8, F = I = W",
                what=f"{name} v={chunks}" if chunks else name,
                quoted=share,
                predicted=measure(timeline),
                unit="",
                source=f"arXiv {paper}, its formula" if paper else "zero by design, in a rank's own span",
            )
        )
    return found


def tensor_drops() -> list[Claim]:
    """Return how much throughput of a GPU is lost where tensor parallelism leaves an 8-GPU node."""
    shape = Shape(
        recipe="gpt", layers=28, hidden=3072, heads=32, kv_heads=32, ffn=12288, sequence=4096, vocabulary=49152
    )
    model = Model(name="gpt-3b", shape=shape)
    rates = {
        tp: dry_run(Ask(model=model, mesh={"tp": tp}), PRESETS["h100"]).tokens_per_second / tp for tp in (8, 16, 32)
    }
    return [
        Claim(
            group="tensor parallel beyond a node, tokens/s/GPU against 8",
            what=f"tp = {tp}",
            quoted=quoted,
            predicted=rates[tp] / rates[8] - 1,
            unit="",
            source="quoted in the field's playbooks, the model and the base not told",
        )
        for tp, quoted in ((16, -0.42), (32, -0.65))
    ]


def scaling() -> list[Claim]:
    """Return TFLOP/s a GPU of 175 B at a global batch of 1,536: ZeRO-3, and tensor 8 x pipeline 12 x data parallel.

    Megatron counts what is executed, recomputation included. ZeRO-3's microbatch is the batch over the GPUs: 4, 2, 1.
    """
    model = model_of("gpt-175b")
    found = []
    for gpus, quoted in zip(_GPUS, (144.0, 88.0, 44.0), strict=True):
        ask = Ask(model=model, mesh={"fsdp": gpus}, microbatch=_BATCH // gpus, checkpointing="full")
        found.append(_rate("ZeRO-3", ask, quoted))
    for gpus, quoted in zip(_GPUS, (153.0, 149.0, 141.0), strict=True):
        ask = Ask(model=model, mesh={"dp": gpus // 96, "pp": 12, "tp": 8}, checkpointing="full")
        found.append(_rate("TP+PP+DP", ask.with_batch(_BATCH), quoted))
    return found


def _rate(name: str, ask: Ask, quoted: float) -> Claim:
    run = dry_run(ask, SELENE)
    return Claim(
        group="175 B, batch 1,536, TFLOP/s a GPU",
        what=f"{name}, {ask.world} GPUs",
        quoted=quoted,
        predicted=megatron_flops_per_second(run) / 1e12,
        unit="TFLOP/s",
        source="arXiv 2104.04473, table 2",
    )


def megatron_flops_per_second(run: DryRun) -> float:
    """Return FLOP/s of one GPU by 96 B s l h^2 (1 + s/6h + V/16lh) (arXiv 2104.04473, equation 3)."""
    shape, ask = run.ask.model.shape, run.ask
    h, s, layers = shape.hidden, shape.sequence, shape.layers
    flops = 96 * ask.tokens * layers * h**2 * (1 + s / (6 * h) + shape.vocabulary / (16 * layers * h))
    return flops / run.time.seconds / ask.world
