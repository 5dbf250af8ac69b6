"""Each rank's order is torch's where it has one, and the papers' otherwise."""

from itertools import product
from pathlib import Path

import pytest

from parbench.bench.text import UserError
from parbench.workloads.pipeline_parallel.order import PipelineSize
from parbench.workloads.pipeline_parallel.schedule import PassSeconds, Schedule
from parbench.workloads.pipeline_parallel.schedules import SCHEDULES
from tests.support.refusals import usage_error
from tests.support.workloads import torch_orders


@pytest.mark.parametrize("name", torch_orders.TORCH_CLASSES)
def test_orders_are_torchs(name: str) -> None:
    """Torch also interleaves microbatches whose number the ranks do not divide."""
    num_compared = 0
    for sizes in product((2, 4), (1, 3, 4, 5, 8, 9), (2, 3)):
        try:
            size = SCHEDULES[name].size(*sizes)
        except UserError:
            continue
        order = SCHEDULES[name].make_order(size)
        assert order.actions_by_rank == torch_orders.order(name, *sizes), sizes
        num_compared += 1
    assert num_compared >= 5


@pytest.mark.parametrize(
    ("name", "rank", "ranks", "microbatches", "order"),
    [
        ("1f1b", 0, 3, 4, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        ("gpipe", 1, 2, 2, "1F0 1F1 1B1 1B0"),
        # arXiv 2401.10241, figures 2 and 3
        ("zb_h1", 0, 3, 3, "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"),
        ("zb_h1", 2, 3, 3, "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2"),
        ("zb_h2", 1, 2, 4, "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"),
    ],
)
def test_orders_of_papers(
    name: str, rank: int, ranks: int, microbatches: int, order: str
) -> None:
    actions = SCHEDULES[name].list_actions(rank, PipelineSize(ranks, microbatches))
    assert " ".join(map(str, actions)) == order


@pytest.mark.parametrize(
    ("name", "sizes", "equation"),
    [
        ("1f1b", (1, 8), "ranks(1) < 2"),
        ("gpipe", (4, 0), "microbatches(0) < 1"),
        ("zb_v", (4, 8, 3), "virtual_stages(3) != 2"),
        ("interleaved", (4, 8, 1), "virtual_stages(1) < 2"),
        ("dualpipe_v", (4, 7), "microbatches(7) < stages(8)"),
        ("interleaved", (4, 9), "microbatches(9) % ranks(4) != 0"),
    ],
)
def test_schedule_refuses_size(name: str, sizes: tuple[int, ...], equation: str) -> None:
    message = usage_error(SCHEDULES[name].size, *sizes)
    assert name in message
    assert equation in message


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_loads_csv(tmp_path: Path, name: str) -> None:
    """Its loader checks the order, and adds sends and receives without a deadlock."""
    schedule = SCHEDULES[name]
    size = schedule.size(4, 8)
    order = schedule.make_order(size)
    text = "\n".join(",".join(map(str, row)) for row in order.actions_by_rank)
    assert schedule.splits_backward == ("W" in text)
    path = tmp_path / "order.csv"
    path.write_text(text)
    runtime = torch_orders.load(path, 4, 8, size.stages_per_rank)
    for rank in range(4):
        for stage in schedule.list_stages(rank, size):
            assert runtime.stage_index_to_group_rank[stage] == rank


def test_new_schedule_needs_only_its_order() -> None:
    schedule = Schedule(name="toy", list_actions=SCHEDULES["gpipe"].list_actions)
    size = schedule.size(2, 3)
    assert schedule.microbatches_in_flight(0, size) == 3
    assert [schedule.logits_in_flight(rank, size) for rank in range(2)] == [0, 3]
    assert schedule.compute_bubble(size, PassSeconds(1, 1, 1)) is None
