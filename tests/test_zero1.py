"""ZeRO-1 sends what its note says, and each rank keeps the optimizer's state of its share alone."""

import pytest
from ranks import Ranks
from test_training import small
from torch import Tensor

from bench.world import World
from workloads.costs import zero1_sent_bytes
from workloads.ddp import num_elements


def parameters_and_moments(world: World) -> tuple[int, int]:
    """Return the parameters of the model, and the elements of first moments that this rank holds after a step."""
    step = small(world, "zero1", {})
    step.step()
    inner = step.layout.optimizer.optim  # type: ignore[attr-defined]
    held = [state["exp_avg"] for state in inner.state.values()]
    return num_elements(step.layout.model), sum(moment.numel() for moment in held if isinstance(moment, Tensor))


def sent_expected_and_torchs(world: World, accumulation: int, precision: str) -> tuple[float, float, float]:
    """Return the bytes of a step, those of the formula, and those of what the note says torch does."""
    from test_training import sent_and_expected

    params = {"accumulation": accumulation, "precision": precision, "vocabulary": 61}
    [(sent, expected)] = sent_and_expected(world, "zero1", [params])
    step = small(world, "zero1", params)
    psi, e = num_elements(step.layout.model), step._options.dtype.itemsize
    torchs = zero1_sent_bytes(psi, e, world.size, num_synchronisations=accumulation)
    return sent["dp"], expected["dp"], torchs["dp"]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_parameters_are_sent_once_more_than_the_formula_says(
    two_ranks: Ranks, accumulation: int, precision: str
) -> None:
    found = two_ranks.call("test_zero1:sent_expected_and_torchs", accumulation=accumulation, precision=precision)
    for sent, expected, torchs in found:
        assert sent == torchs
        # Psi e more than 2 Psi e (n-1)/n a synchronisation, which is Psi e on two ranks
        assert sent / expected == (accumulation + 1) / accumulation


def test_the_row_says_so(two_ranks: Ranks) -> None:
    for description in two_ranks.call("test_training:described", name="zero1", params={}):
        assert [note for note in description.notes if "broadcasts every parameter" in note]


def test_each_moment_is_held_by_one_rank(two_ranks: Ranks) -> None:
    (psi, first), (_, second) = two_ranks.call("test_zero1:parameters_and_moments")
    assert first + second == psi
    assert abs(first - second) < 0.2 * psi


@pytest.mark.slow
def test_four_ranks_send_a_broadcast_more() -> None:
    with Ranks(4) as ranks:
        for sent, expected, torchs in ranks.call(
            "test_zero1:sent_expected_and_torchs", accumulation=1, precision="float32"
        ):
            assert sent == torchs
            assert sent / expected == pytest.approx(5 / 3)  # (2 * 3/4 + 1) over 2 * 3/4
