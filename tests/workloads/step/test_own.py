"""A step that says nothing of itself is explained, and a training loop's gradients are held against a reference."""

from typing import Any, cast

import pytest
import torch

import parbench
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.step.own import OwnStep
from tests.support import own_steps
from tests.support.ranks import Ranks


def checked(world: World, name: str, **how: Any) -> tuple[int, list[str]]:
    benchmark = cast(Any, getattr(own_steps, name)(world, **how))
    for _ in range(2):
        benchmark.reset()
        benchmark.step()
    return benchmark.check(), list(benchmark.differences())


def explanation(world: World, name: str, **how: Any) -> Explanation:
    benchmark = getattr(own_steps, name)(world, **how)
    own = OwnStep(world, benchmark)
    for _ in range(2):
        own.step()
    found = own.explain(benchmark.reset, 0.0)
    own.close()
    return found


@pytest.mark.parametrize("name", ["cnn", "blocks", "split_in_columns_and_rows"])
def test_the_gradients_of_a_loop_are_the_mean_over_ranks_of_its_references(
    two_ranks: Ranks, name: str
) -> None:
    assert two_ranks.call("tests.workloads.step.test_own:checked", name=name) == [(0, [])] * 2


def test_a_gradient_that_is_not_is_named_on_every_rank(two_ranks: Ranks) -> None:
    for wrong, named in two_ranks.call(
        "tests.workloads.step.test_own:checked", name="cnn", wrong=True
    ):
        assert wrong == 1
        assert named == ["0.weight: gradient is 1 of its length from the reference's"]


def test_bytes_are_told_by_the_names_of_process_groups(two_ranks: Ranks) -> None:
    found = two_ranks.call("tests.workloads.step.test_own:explanation", name="bare")[0].metrics
    assert found["bytes_sent.tp"].value == 4096  # 2 (n-1)/n of 4 KiB on two ranks
    assert found["bytes_sent.world"].value == 1024
    assert {"ect", "exposed_comm.tp", "exposed_comm.world", "idle", "compute"} <= found.keys()


def test_a_loop_has_its_parts_memory_flops_and_optimizer_told(two_ranks: Ranks) -> None:
    ddp, fsdp = (
        two_ranks.call("tests.workloads.step.test_own:explanation", name=name)[0]
        for name in ("cnn", "blocks")
    )
    whole = (8 * 3 * 9 + 8 + 16 * 8 * 10 + 10) * 4
    assert ddp.metrics["bytes_sent.world"].value == whole
    assert 0 < ddp.metrics["mfu"].value < 1
    assert ddp.metrics["optimizer_time"].value > 0
    assert ddp.metrics["memory_peak"].value > whole
    parameters = 3 * (2 * 32 + 2 * 4 * 32 * 32 + 5 * 32)
    # a block's all_gather forward and backward, the last one's forward alone, and reduce_scatter: half of each is sent
    assert fsdp.metrics["bytes_sent.world"].value == pytest.approx(
        (2 + 2 / 3) / 2 * 4 * parameters, rel=0.2
    )
    # forward 2 FLOPs a weight and token, backward twice that, but no gradient for the batch
    assert fsdp.details["flops_per_rank"] == pytest.approx(
        3 * 2 * 4 * 16 * (3 * 2 * 4 * 32 * 32), rel=0.2
    )


def test_bytes_of_split_products_are_those_of_activations(two_ranks: Ranks) -> None:
    found = two_ranks.call(
        "tests.workloads.step.test_own:explanation", name="split_in_columns_and_rows"
    )[0].metrics
    # each block sums its output forward and its input's gradient backward; a mesh of all ranks has the world's group
    assert found["bytes_sent.world"].value == 4 * 4 * 16 * 32 * 4


def test_a_pipelines_stages_send_what_lies_between_them(two_ranks: Ranks) -> None:
    assert two_ranks.call("tests.workloads.step.test_own:checked", name="stages") == [(0, [])] * 2
    first = two_ranks.call("tests.workloads.step.test_own:explanation", name="stages")[0]
    # four microbatches of two sequences: activations there, their gradients back
    assert first.metrics["bytes_sent.world"].value == pytest.approx(4 * 2 * 16 * 32 * 4, rel=0.01)
    assert {"exposed_comm.world", "compute", "memory_peak"} <= first.metrics.keys()
    assert first.timeline is not None
    assert len(first.timeline.ranks) == 2


def test_a_loop_that_cannot_be_checked_as_asked_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="a module needs a loss"):
        parbench.step_of(torch.nn.Linear(1, 1), None, None, optimizer)
    with pytest.raises(ValueError, match="a schedule takes no reference"):
        parbench.step_of(object(), None, None, optimizer, torch.nn.Linear(1, 1))
