"""A boundary between ranks is passed once each way by every microbatch; one within a rank is not."""

from workloads.pipeline.pipeline_case import pipeline_of
from workloads.pipeline.pp_bytes import bytes_by_link, bytes_by_rank, message_bytes
from workloads.shapes import SHAPES

SHAPE = SHAPES["small"]
EACH = 3 * 128 * 192 * 4  # b s h e


def links(**params: int | str) -> dict[tuple[int, int], int]:
    pipeline = pipeline_of({"microbatches": 8, **params}, SHAPE, 4)
    return {link: sent // (8 * EACH) for link, sent in bytes_by_link(pipeline, SHAPE, 3, 4).items()}


def test_a_message_is_one_microbatchs_activations() -> None:
    assert message_bytes(SHAPE, 3, 4) == EACH
    assert message_bytes(SHAPE, 3, 2) == EACH // 2


def test_a_line_of_ranks_passes_each_boundary_both_ways() -> None:
    assert links(schedule="1f1b") == {(0, 1): 1, (1, 0): 1, (1, 2): 1, (2, 1): 1, (2, 3): 1, (3, 2): 1}


def test_loops_pass_them_again_and_go_from_the_last_rank_to_the_first() -> None:
    assert links(schedule="interleaved", chunks=2) == {
        **dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)), 2),
        (3, 0): 1,
        (0, 3): 1,
    }


def test_a_v_turns_within_the_last_rank() -> None:
    assert links(schedule="zb_v") == dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)), 2)


def test_a_rank_sends_what_leaves_it_on_all_links() -> None:
    pipeline = pipeline_of({"microbatches": 8, "schedule": "1f1b"}, SHAPE, 4)
    assert bytes_by_rank(pipeline, SHAPE, 3, 4) == [8.0 * EACH, 16.0 * EACH, 16.0 * EACH, 8.0 * EACH]
