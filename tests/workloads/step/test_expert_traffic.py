"""Loads, drops and bytes of experts on ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.mesh.dims import ParallelDims
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.step.expert_probe import make_load_metrics
from parbench.workloads.step.expert_traffic import ExpertTraffic, RoutingCounts

TINY = replace(SHAPES["tiny"], sequence=8)  # each of two ranks of tp has 4 tokens
SPEC = StepSpec(shape=TINY, bytes_per_element=4, microbatches=2)
ROW = TINY.hidden * 4
COUNTS = [
    RoutingCounts(
        layers=(0, 1),
        selected=32,
        dispatched=torch.tensor([[6, 4, 2, 2], [4, 4, 4, 4]]),
    ),
    RoutingCounts(
        layers=(0, 1),
        selected=32,
        dispatched=torch.tensor([[8, 4, 0, 0], [4, 4, 4, 4]]),
    ),
]
"""Pairs of two ranks in two microbatches by layer and expert; each rank has two experts."""


def make_traffic(spec: StepSpec = SPEC, **params: Any) -> ExpertTraffic:
    moe = make_moe({"experts": 4, "capacity": 2.0, **params}, TINY, 2)
    dims = ParallelDims(tp=2, ep=moe.ep, etp=moe.etp)
    return ExpertTraffic(replace(spec, dims=dims, moe=moe), COUNTS)


def test_loads_of_ranks_are_by_layer() -> None:
    assert make_traffic().list_rank_loads() == [[22, 4], [16, 16]]


def test_loads_of_stages_are_by_layer() -> None:
    """Two pipeline stages have a rank and a layer each."""
    moe = make_moe({"experts": 4, "ep": 1}, TINY, 1)
    counts = [
        RoutingCounts((layer,), 16, counts.dispatched[:1])
        for layer, counts in enumerate(COUNTS)
    ]
    spec = replace(SPEC, dims=ParallelDims(pp=2), moe=moe)
    traffic = ExpertTraffic(spec, counts)
    assert traffic.list_rank_loads() == [[14], [12]]


def test_load_metrics_are_of_worst_layer() -> None:
    metrics = make_load_metrics(make_traffic())
    assert metrics["imbalance.rank"].value == 22 / 13
    assert metrics["drop_rate"].value == pytest.approx(6 / 64)


def test_all_to_all_sends_pairs_and_counts() -> None:
    """Rank 0 sends 12 of its pairs, and the results of 20 pairs of rank 1."""
    traffic = make_traffic()
    assert traffic.pairs[0, 1].tolist() == [4, 8]
    assert traffic.pairs[1, 0].tolist() == [12, 8]
    rows = (12 + 20) * ROW
    counts = 4 * (4 * 8) / 2  # in each layer and microbatch
    assert traffic.compute_bytes(0) == {"ep": 2 * rows + counts}
    assert traffic.compute_bytes(0, has_backward=False) == {"ep": rows + counts}
    recomputed = make_traffic(replace(SPEC, checkpointing="full"))
    assert recomputed.compute_bytes(0) == {"ep": 3 * rows + 2 * counts}


def test_recomputation_stops_before_last_sum() -> None:
    """Ranks that split experts sum the results last, if no shared expert follows."""
    spec = replace(SPEC, checkpointing="full")
    with_shared = make_traffic(spec, etp=2, shared=1).compute_bytes(0)["etp"]
    without_shared = make_traffic(spec, etp=2, shared=0).compute_bytes(0)["etp"]
    assert with_shared - without_shared == 4 * (4 * ROW)  # half of 2 * 4 tokens
