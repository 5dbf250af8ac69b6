"""A gradient that is missing or a multiple of itself is wrong and named, however small its tensor; none else is."""

from ranks import Ranks
from training_steps import SMALL, Params

SOME = ["layers.1.attention.q.weight", "layers.0.ffn_norm.weight"]
NARROW = {"precision": "bfloat16"}


def assert_named(ranks: Ranks, name: str, params: Params, **how: object) -> None:
    found = ranks.call("spoilings:unseen", name=name, params={**SMALL, **params}, tensors=SOME, **how)
    assert not set.intersection(*map(set, found)), (name, params, how)


def test_a_wrong_gradient_is_named_in_every_precision_whether_one_rank_spoils_it_or_all(two_ranks: Ranks) -> None:
    assert_named(two_ranks, "ddp", {}, spoilings=["halved"])
    assert_named(two_ranks, "ddp", NARROW)
    assert_named(two_ranks, "ddp", {**NARROW, "recipe": "llama"}, spoilings=["halved"], only=1)
    assert_named(two_ranks, "ddp", {"grad_compression": "bf16"}, spoilings=["halved"])


def test_so_it_is_where_parameters_or_the_sequence_are_split(two_ranks: Ranks) -> None:
    assert_named(two_ranks, "fsdp", NARROW, spoilings=["missing", "halved"], only=1, after=True)
    assert_named(two_ranks, "tp", NARROW, spoilings=["halved"])
    assert_named(two_ranks, "cp", {**NARROW, "method": "zigzag"}, spoilings=["halved", "negated"], only=1)
