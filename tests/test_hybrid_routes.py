"""Routes are of tokens, whichever rank takes them: parts of ranks together are the whole microbatch's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workloads.experts.moe import MoeLayer
from workloads.experts.moe_case import moe_of
from workloads.hybrid import hybrid_routes
from workloads.hybrid.hybrid_routes import Routes, mixtures_of
from workloads.shapes import SHAPES

SHAPE = replace(SHAPES["tiny"], hidden=16, ffn=32, sequence=8)
MOE = moe_of({"ep": 1, "experts": 4, "routing": "zipf"}, SHAPE, 1)
SIZE = (2, 8)


def layers(count: int = 2) -> dict[int, MoeLayer]:
    return {2 + n: MoeLayer(SHAPE, MOE) for n in range(count)}


def routes(mine: list[int], *, generated: bool = True) -> Routes:
    """Return the routes of a step that takes eight microbatches."""
    found = Routes(MOE.generator(0, 1, 64) if generated else None, SIZE, mine, torch.device("cpu"))
    found.begin(0, range(8))
    return found


def given(mixture: MoeLayer) -> torch.Tensor:
    assert mixture.given is not None
    return mixture.given


def test_parts_of_a_generator_s_routes_are_cut_by_position() -> None:
    whole, part = layers(1), layers(1)
    routes([0]).give_all(whole, 3)
    expected = given(whole[2]).view(2, 8, 2)
    for mine in ([0, 1], [5, 7, 2]):
        routes(mine).give(part, 3)
        assert torch.equal(given(part[2]).view(2, len(mine), 2), expected[:, mine])
    assert part[2].microbatch == 3


def test_routes_change_with_step_and_microbatch() -> None:
    mixture = layers(1)
    seen = []
    taken = routes(list(range(8)))
    for step, microbatch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        taken.begin(step, [microbatch])
        taken.give(mixture, microbatch)
        seen.append(given(mixture[2]).tolist())
    assert seen[0] == seen[3]
    assert seen[0] != seen[1]
    assert seen[0] != seen[2]


def test_routes_are_drawn_before_the_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator's routes are the same in all layers; in a step, none is drawn."""
    taken, mixtures = routes([0, 1]), layers(3)
    monkeypatch.setattr(hybrid_routes, "routes", lambda *_: pytest.fail("drawn within the step"))
    for microbatch in (0, 7, 0):
        taken.give(mixtures, microbatch)
        assert len({id(mixture.given) for mixture in mixtures.values()}) == 1
    with pytest.raises(KeyError, match="8"):
        taken.give(mixtures, 8)


def test_without_a_generator_the_router_chooses() -> None:
    mixture = layers(1)
    routes([0, 1], generated=False).give(mixture, 0)
    assert mixture[2].given is None


def test_what_ranks_took_joins_to_whole_microbatches_and_is_given_again() -> None:
    expected = {layer: torch.randint(4, (2, 8, 2)) for layer in (2, 3)}
    told = []
    for mine in ([0, 3, 5], [1, 2, 4, 6, 7]):
        mixtures, one = layers(), routes(mine, generated=False)
        for layer, mixture in mixtures.items():
            mixture.chosen[6] = expected[layer][:, mine].flatten(0, 1)
        told.append(one.taken(mixtures))
    one = routes([1, 0], generated=False)
    one.frozen = one.joined(told)
    assert one.frozen.keys() == {6}
    mixtures = layers()
    one.give(mixtures, 6)
    for layer, mixture in mixtures.items():
        assert torch.equal(one.frozen[6][layer], expected[layer])
        assert torch.equal(given(mixture), expected[layer][:, [1, 0]].flatten(0, 1))
    one.give_all(mixtures, 6)
    assert torch.equal(given(mixtures[3]), expected[3].flatten(0, 1))


def test_a_token_that_no_rank_took_goes_nowhere() -> None:
    one, mixtures = routes([0, 1], generated=False), layers(1)
    mixtures[2].chosen[0] = torch.zeros(4, 2, dtype=torch.long)
    joined = one.joined([one.taken(mixtures)])
    assert (joined[0][2][:, 2:] == -1).all()
    assert (joined[0][2][:, :2] == 0).all()


@pytest.mark.parametrize("dense", [True, False])
def test_mixtures_are_found_by_the_number_of_their_layer(dense: bool) -> None:
    ffn = nn.Linear(1, 1) if dense else MoeLayer(SHAPE, MOE)
    found = mixtures_of([("5", SimpleNamespace(ffn=ffn))])  # type: ignore[list-item]
    assert found == ({} if dense else {5: ffn})
