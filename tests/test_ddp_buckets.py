"""DDP's buckets: filled as torch fills them, in the order of the backward pass; what they leave to wait for."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from workloads.hybrid.hybrid_tensors import ParameterPart, parts_of_rank
from workloads.model import Transformer
from workloads.planner.ddp_buckets import Bucket, buckets_of, exposed_seconds
from workloads.shapes import SHAPES, num_parameters

MEBI = 2**20
TINY = SHAPES["tiny"]


def parts() -> list[ParameterPart]:
    return parts_of_rank(TINY, (0,), (TINY.layers,))


@pytest.mark.parametrize("cap", [1, 100_000, MEBI, 25 * MEBI])
def test_every_gradient_is_in_one_bucket(cap: int) -> None:
    buckets = buckets_of(parts(), cap_bytes=cap, element_bytes=4)
    assert sum(bucket.size_bytes for bucket in buckets) == 4 * num_parameters(TINY)
    assert all(bucket.size_bytes >= cap for bucket in buckets[:-1])


@pytest.mark.parametrize("cap", [50_000, MEBI])
def test_buckets_are_filled_as_torch_fills_them(cap: int) -> None:
    with torch.device("meta"):
        tensors = [parameter for _, parameter in sorted(Transformer(TINY).named_parameters(), key=order)]
    assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
    reducer = assign([torch.empty(t.shape) for t in reversed(tensors)], [cap])
    sizes = [sum(list(reversed(tensors))[i].numel() * 4 for i in bucket) for bucket in reducer[0]]
    assert [b.size_bytes for b in buckets_of(parts(), cap_bytes=cap, element_bytes=4)] == sizes


def order(named: tuple[str, torch.nn.Parameter]) -> int:
    return [part.name for part in parts()].index(named[0])


def test_the_first_bucket_starts_early_and_the_embeddings_end_with_the_pass() -> None:
    buckets = buckets_of(parts(), cap_bytes=1, element_bytes=4)
    assert [bucket.ready for bucket in buckets] == sorted(bucket.ready for bucket in buckets)
    assert (buckets[0].ready, buckets[-1].ready) == (0.0, 1.0)
    by_name = dict(zip((part.name for part in reversed(parts())), (bucket.ready for bucket in buckets), strict=True))
    firsts = [by_name[f"layers.{layer}.attention_norm.weight"] for layer in range(4)]
    assert firsts == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_elements_of_two_bytes_halve_the_sizes() -> None:
    [whole], [half] = (buckets_of(parts(), cap_bytes=25 * MEBI, element_bytes=size) for size in (4, 2))
    assert whole.size_bytes == 2 * half.size_bytes


def test_one_bucket_hides_nothing() -> None:
    assert exposed_seconds([Bucket(size_bytes=10, ready=1.0)], lambda size: size / 10, 5.0) == 1.0


def test_short_buckets_show_the_last_alone_and_long_ones_all_that_the_pass_does_not_cover() -> None:
    four = [Bucket(size_bytes=1, ready=(i + 1) / 4) for i in range(4)]
    assert exposed_seconds(four, lambda size: 0.5, 8.0) == 0.5
    assert exposed_seconds(four, lambda size: 4.0, 8.0) == 8 / 4 + 4 * 4.0 - 8.0


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=8), st.floats(0, 100))
def test_what_shows_is_at_most_all_of_it_and_at_least_what_the_pass_cannot_cover(
    given_buckets: list[tuple[int, float]], window: float
) -> None:
    ready = sorted(share for _, share in given_buckets)
    buckets = [Bucket(size_bytes=size, ready=share) for (size, _), share in zip(given_buckets, ready, strict=True)]
    whole = sum(bucket.size_bytes for bucket in buckets)
    shown = exposed_seconds(buckets, float, window)
    assert whole - window <= shown + 1e-9
    assert shown <= whole + 1e-9
