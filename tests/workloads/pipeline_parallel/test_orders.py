"""Each rank's order is torch's, where torch has one, and the papers' figures elsewhere."""

from itertools import product

import pytest
import torch_orders

from bench.results.details import Action
from bench.text import UserError
from workloads.pipeline_parallel import orders
from workloads.pipeline_parallel.schedules import make_schedule

SIZES = (2, 3, 4, 5, 8)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_looped_orders_are_those_of_torchs_classes_where_those_exist(name: str) -> None:
    compared = 0
    for ranks, microbatches, chunks in product(SIZES, (1, 2, 3, 5, 7, 8, 9, 12, 16, 17), (2, 3)):
        asked = (ranks, microbatches, chunks)
        try:
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        except UserError:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_orders.order(name, *asked)
            continue
        assert ours.order == torch_orders.order(name, *asked), asked
        compared += 1
    assert compared > 50


def test_the_vs_are_torchs_with_few_microbatches_and_overlapped_pairs_in_sequence() -> None:
    for ranks in SIZES:
        asked = [("zb_v", count) for count in range(1, 3 * ranks)]
        asked += [("dualpipe_v", count) for count in range(2 * ranks, 3 * ranks + 2)]
        for name, microbatches in asked:
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches)
            assert ours.order == torch_orders.order(name, ranks, microbatches, 2), (name, ranks, microbatches)


def test_one_stage_orders_are_what_torchs_runtime_does() -> None:
    for name, ranks in product(("gpipe", "1f1b"), SIZES):
        for microbatches in range(1, 2 * ranks + 2):
            ours = make_schedule(name, ranks=ranks, microbatches=microbatches)
            theirs = tuple(torch_orders.run(name, rank, ranks, microbatches) for rank in range(ranks))
            assert ours.order == theirs, (name, ranks, microbatches)
    for ranks in SIZES:  # zb_h1 is torch's interleaved zero bubble with one stage a rank, and so is ours
        h1, one_chunk = (
            make_schedule(name, ranks=ranks, microbatches=2 * ranks, chunks=1).order
            for name in ("zb_h1", "interleaved_zb")
        )
        assert h1 == one_chunk == torch_orders.order("interleaved_zb", ranks, 2 * ranks, 1), ranks


def written(actions: tuple[Action, ...]) -> str:
    """As the papers' figures: kind and microbatch, and a prime for the second chunk."""
    least = min(action.stage for action in actions)
    return " ".join(f"{action.kind}{action.microbatch}{chr(39) * (action.stage > least)}" for action in actions)


def test_orders_are_those_of_the_papers_figures() -> None:
    """arXiv 2401.10241: in figure 2 the first rank's weights follow at once, the last one's fill the end; in figure 3
    rank 0 makes 2P-1 forwards before the first backward, and as many are held on the last."""
    for actions, expected in (
        (orders.naive(1, 2), "F0 B0 F1 B1"),
        (orders.one_f_one_b(0, 3, 4), "F0 F1 F2 B0 F3 B1 B2 B3"),
        (orders.one_f_one_b(2, 3, 4), "F0 B0 F1 B1 F2 B2 F3 B3"),
        (orders.looped_bfs(0, 2, 2, 2), "F0 F1 F0' F1' B1' B0' B1 B0"),
        (orders.interleaved(1, 2, 2, 2), "F0 F1 F0' B0' F1' B1' B0 B1"),
        (orders.interleaved_zb(0, 3, 3, 1), "F0 F1 F2 I0 W0 I1 W1 I2 W2"),
        (orders.interleaved_zb(2, 3, 3, 1), "F0 I0 F1 I1 F2 I2 W0 W1 W2"),
        (orders.zb_h2(0, 2, 4), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        (orders.zb_h2(1, 2, 4), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
        (orders.zb_v(1, 2, 3), "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' I1 I2' I2 W1 W2' W2"),
    ):
        assert written(actions) == expected
