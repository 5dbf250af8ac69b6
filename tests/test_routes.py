"""A step's routes are drawn before it, the same for whoever asks, and can be frozen."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from workloads.experts import routes as module
from workloads.experts.routes import Drawn
from workloads.experts.routing import Generator, routes

GENERATOR = Generator(name="zipf", strength=1.0, seed=3, experts=8, top_k=2, parts=2, tokens=64)
CPU = torch.device("cpu")


def listed(found: object) -> list[tuple[int, ...]]:
    assert isinstance(found, Tensor)
    return [tuple(of) for of in found.tolist()]


def test_a_microbatch_has_its_part_of_the_global_batch() -> None:
    drawn = Drawn(GENERATOR, 16, CPU)
    drawn.begin(2, range(4, 6))
    assert listed(drawn.of(5)) == routes(GENERATOR, 2, 80, 16)
    assert listed(drawn.of(0)) == routes(GENERATOR, 2, 0, 16)


@pytest.mark.parametrize("name", ["zipf", "ragged"])
def test_ranks_that_share_a_microbatch_take_the_routes_of_their_own_positions(name: str) -> None:
    """Three sequences of 8 in two microbatches: part 1 has positions 4 to 7 of each."""
    generator = replace(GENERATOR, name=name, strength=0.5, tokens=24)
    whole, parts = Drawn(generator, 24, CPU), Drawn(generator, 24, CPU, sequences=3, parts=2)
    for number in range(4):
        microbatch, part = divmod(number, 2)
        expected = [
            route
            for sequence in range(3)
            for route in listed(whole.of(microbatch))[8 * sequence + 4 * part : 8 * sequence + 4 * part + 4]
        ]
        assert listed(parts.of(number)) == expected
    assert listed(parts.of_all(1)) == [*listed(parts.of(2)), *listed(parts.of(3))]
    assert listed(whole.of_all(1)) == listed(whole.of(1))


def test_frozen_routes_and_routers_are_joined_by_layer_and_left_to_choose() -> None:
    drawn = Drawn(None, 8, CPU, sequences=2, parts=2)
    assert drawn.of_all(0) is None
    drawn.frozen = {number: {3: torch.full((4, 2), number)} for number in range(4)}
    joined = drawn.of_all(1)
    assert isinstance(joined, Mapping)
    assert list(joined) == [3]
    assert joined[3].tolist() == [[2, 2]] * 4 + [[3, 3]] * 4


def test_each_step_has_its_own() -> None:
    drawn = Drawn(GENERATOR, 16, CPU)
    drawn.begin(0, range(1))
    first = listed(drawn.of(0))
    drawn.begin(1, range(1))
    assert listed(drawn.of(0)) != first


def test_what_a_step_takes_is_drawn_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(GENERATOR, 16, CPU)
    drawn.begin(0, range(2, 4))
    monkeypatch.setattr(module, "routes", None)
    assert len(listed(drawn.of(2))) == len(listed(drawn.of(3))) == 16


def test_a_router_is_left_to_choose() -> None:
    drawn = Drawn(None, 16, CPU)
    drawn.begin(0, range(2))
    assert drawn.of(0) is None


def test_frozen_routes_come_before_all_else() -> None:
    for generator in (GENERATOR, None):
        drawn = Drawn(generator, 16, CPU)
        frozen = {0: {0: torch.zeros(16, 2, dtype=torch.int64)}}
        drawn.frozen = frozen
        assert drawn.of(0) is frozen[0]
        drawn.frozen = None
        assert drawn.of(0) is not frozen[0]
