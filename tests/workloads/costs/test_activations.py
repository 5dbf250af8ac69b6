"""Closed forms of activations are what a stage's forward pass saves, to the byte, and fall as axes are added."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parbench.workloads.costs.memory import layer_equation, stage_equation
from parbench.workloads.costs.step_spec import Position, StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, moe_of
from parbench.workloads.expert_parallel.moe_layer import exchange_ffns, mixtures
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import Transformer, build, checkpoint
from parbench.workloads.pipeline_parallel.stages import Chunk
from parbench.workloads.step.memory import SavedTensors

TINY, LLAMA = SHAPES["tiny"], SHAPES["tiny-llama"]
CPU = torch.device("cpu")
DTYPES = {4: torch.float32, 2: torch.bfloat16}
N, H = 3 * 64, 128  # tokens of a microbatch, hidden size


def kept(shape: Shape = TINY, mesh: dict[str, int] | None = None, **more: Any) -> Position:
    given = {"microbatch": 3, "element_bytes": 4, "device": "cpu", "microbatches": 4, **more}
    return StepSpec(shape=shape, mesh=mesh or {}, ends="tokens", **given).at(0)


def layers(mesh: dict[str, int] | None = None, shape: Shape = TINY, **more: Any) -> float:
    of = kept(shape, mesh, **more)
    return layer_equation(of, of.spec.checkpointing).value


def mixture(shape: Shape, shared: int = 1) -> Moe:
    return moe_of({"ep": 1, "experts": 4, "top_k": 2, "shared": shared}, shape, 1)


def model_of(of: Position) -> Transformer:
    model = build(of.spec.shape, 0, CPU, DTYPES[of.spec.element_bytes])
    if of.spec.moe is not None:
        exchange_ffns(model, of.spec.shape, of.spec.moe, 0)
        first = torch.arange(of.spec.local_tokens)
        for one in mixtures(model):
            one.given = torch.stack([first % 4, (first + 1) % 4], dim=1)
    checkpoint(model, of.spec.checkpointing)
    return model


def forward(chunk: Chunk, of: Position) -> Tensor:
    size = (of.spec.microbatch, of.spec.shape.sequence)
    tokens, targets = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    between = torch.zeros(
        *size, of.spec.shape.hidden, dtype=DTYPES[of.spec.element_bytes], requires_grad=True
    )
    output: Tensor = chunk(tokens if chunk.tokens is not None else between)
    return (
        output if chunk.head is None else F.cross_entropy(output.flatten(0, 1), targets.flatten())
    )


def assert_saved(of: Position, stage: int) -> None:
    counts = of.layers_by_stage
    chunk = Chunk(model_of(of), sum(counts[:stage]), counts[stage])
    with SavedTensors(chunk) as saved:
        forward(chunk, of)
    assert saved.num_bytes == stage_equation(of, stage).value, (of.spec, stage)


def test_a_stage_saves_what_the_closed_form_says() -> None:
    ways: list[dict[str, Any]] = [{}, {"microbatch": 1}, {"element_bytes": 2}]
    ways += [
        {"checkpointing": how, "element_bytes": e}
        for how, e in product(("selective", "full"), (4, 2))
    ]
    for shape, more in product((TINY, LLAMA), ways):
        for split, stage in (("4", 0), ("1+2+1", 0), ("1+2+1", 1), ("1+2+1", 2)):
            assert_saved(kept(shape, {"pp": split.count("+") + 1}, split=split, **more), stage)
    for shape, element_bytes, shared in product((TINY, LLAMA), (4, 2), (0, 1, 2)):
        moe = mixture(shape, shared)
        assert_saved(kept(replace(shape, layers=1), element_bytes=element_bytes, moe=moe), 0)
    assert_saved(
        kept(replace(LLAMA, layers=1, heads=1, kv_heads=1)), 0
    )  # one head needs no other layout


def test_cuda_keeps_a_fused_norm_s_input_alone_and_in_float32_what_attention_gives_once() -> None:
    norms = {e: 2 * N * H * (8 - e) for e in (2, 4)}
    for mesh, e, saved in (
        ({}, 4, norms[4] + N * H * 4),
        ({}, 2, norms[2]),
        ({"cp": 2}, 4, norms[4] / 2),
    ):
        composed, fused = (
            layers(mesh, LLAMA, element_bytes=e, device=how) for how in ("cpu", "cuda")
        )
        assert composed - fused == saved, (mesh, e)
    ends = [
        stage_equation(kept(LLAMA, {"pp": 4}, element_bytes=2, device=how), 3).value
        - layers({}, LLAMA, element_bytes=2, device=how)
        for how in ("cpu", "cuda")
    ]
    assert ends[0] - ends[1] == N * H * (8 - 2)
