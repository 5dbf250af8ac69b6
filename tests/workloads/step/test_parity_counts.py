"""Elements, distances and fills are counted as wrong where rounding does not explain them."""

import math
from collections.abc import Callable, Iterator
from functools import cache, reduce

import pytest
import torch
from torch import Tensor, nn

from parbench.workloads.context_parallel.attention_kernel import CpuFlash
from parbench.workloads.context_parallel.attention_methods import RingAttention
from parbench.workloads.context_parallel.context_case import Tile
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import SHAPES
from parbench.workloads.model.timed_compute import TimedCompute, TimedLinear, fill_distinct_gradients, make_timed
from parbench.workloads.model.transformer import Core, build, draw_tokens, loss_of
from parbench.workloads.step import parity
from parbench.workloads.step.parity import (
    DISTANCE_MARGIN,
    DRAWS,
    FLOOR,
    RELATIVE_TOLERANCE,
    ROUNDING_MARGIN,
    Alone,
    Tensors,
    compare,
    compare_distances,
    compare_elements,
    count_unfilled,
)
from parbench.workloads.step.parity import moved as draw_moved

REFERENCE = torch.tensor([4.0, -8.0, 0.0, 1e-6])
LIMIT = RELATIVE_TOLERANCE * 8
DTYPES = [torch.float32, torch.bfloat16]


def with_element(index: int, value: float, tensor: Tensor = REFERENCE) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def wrong_elements(found: Tensors, expected: Tensors, exact: Tensors | None = None, *more: Tensors) -> dict[str, int]:
    """Return how many elements of each wrong tensor are; float64 says what float32 does if nothing else is given.

    ``more`` are further roundings of one process's in float32; the last one comes again and again.
    """

    def alone(dtype: torch.dtype, draw: int) -> Tensors:
        if dtype == torch.float64:
            return exact or expected
        return (expected, *more)[min(draw, len(more))]

    return {one.name: one.wrong for one in compare(found, expected, alone, None) if one.wrong}


def apart(found: Tensor, reference: Tensor = REFERENCE) -> int:
    return wrong_elements({"w": found}, {"w": reference}).get("w", 0)


def test_the_tolerance_is_of_the_largest_reference_value_whichever_element_it_is() -> None:
    for index in range(4):
        for by, wrong in ((0.9, 0), (-0.9, 0), (1.1, 1), (-1.1, 1), (1e9, 1)):
            assert apart(with_element(index, float(REFERENCE[index]) + by * LIMIT)) == wrong, (index, by)
    assert apart(with_element(0, 1e9)) == 1, "the largest value is not ours"
    assert apart(torch.full((3,), 1e9), zeros := torch.zeros(3)) == 3
    assert (apart(zeros, zeros), apart(with_element(1, 1e-30, zeros), zeros)) == (0, 1)


def test_a_small_tensor_is_wrong_by_its_own_size_beside_a_large_one_unless_it_is_rounding() -> None:
    """Beside gradients of 8, those of a millionth may be a sum that cancels: float64 has another."""
    tiny = torch.tensor([1e-6, -1e-6])
    expected = {"large": REFERENCE, "tiny": tiny}
    for factor in (0.0, 0.5, 2.0, -1.0, 1 + 1.1 * RELATIVE_TOLERANCE):
        found = {"large": REFERENCE, "tiny": factor * tiny}
        assert wrong_elements(found, expected) == {"tiny": 2}, factor
        for rounding in (0.1 / ROUNDING_MARGIN, 2.1 / ROUNDING_MARGIN):
            exact = {"large": REFERENCE.double(), "tiny": (1 - rounding) * tiny.double()}
            hidden = abs(factor - (1 - rounding)) <= ROUNDING_MARGIN * rounding
            assert wrong_elements(found, expected, exact) == ({} if hidden else {"tiny": 2}), (factor, rounding)
    assert wrong_elements({"large": REFERENCE}, expected) == {"tiny": 2}


def test_what_is_no_number_is_wrong_and_passes_nothing_off_as_right() -> None:
    """A limit that is infinite would let everything through."""
    for bad in (math.nan, math.inf, -math.inf):
        assert apart(with_element(2, bad)) == 1, bad
        reference = with_element(2, bad)
        assert min(apart(found, reference) for found in (REFERENCE, REFERENCE * 7, reference)) > 0, bad


def test_tensors_are_compared_by_name_and_a_missing_one_is_zero() -> None:
    assert wrong_elements({}, {}) == {}
    expected = dict.fromkeys("abc", REFERENCE)
    assert wrong_elements({"b": REFERENCE, "c": REFERENCE}, expected) == {"a": 2}
    assert wrong_elements({"a": -REFERENCE, "c": with_element(0, 5.0)}, expected) == {"a": 2, "b": 2, "c": 1}
    assert wrong_elements({"b": REFERENCE, "a": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == {}
    assert wrong_elements({"a": REFERENCE, "b": -REFERENCE}, {"a": -REFERENCE, "b": REFERENCE}) == {"a": 2, "b": 2}


def far(found: Tensors, expected: Tensors, *alone: Tensors) -> dict[str, str]:
    """Return what is wrong of a tensor beside one process's roundings in bfloat16, of which there are so many."""
    roundings = {name: [(of[name].float() - reference).norm() for of in alone] for name, reference in expected.items()}
    return {one.name: one.how for one in compare_distances(found, expected, roundings, torch.bfloat16) if one.wrong}


def moved(by: float, index: int = 0) -> Tensor:
    """Return a tensor of length 5 that is so many lengths from (3, 4, 0)."""
    return with_element(index, 3 * (index == 0) + 4 * (index == 1) + 5 * by, torch.tensor([3.0, 4.0, 0.0]))


def test_a_tensors_limit_is_a_margin_over_its_own_rounding_and_a_floor_of_its_own_size() -> None:
    floor = FLOOR * torch.finfo(torch.bfloat16).eps
    large = torch.full((100,), 1e3)
    expected = {"large": large, "small": moved(0)}
    for rounding in (0.0, 0.1, 0.3):
        limit, alone = DISTANCE_MARGIN * rounding + floor, {"large": 0.9 * large, "small": moved(rounding)}
        for index in (0, 2):
            assert far({"large": large, "small": moved(0.99 * limit, index)}, expected, alone) == {}
            assert far({"large": large, "small": moved(1.01 * limit, index)}, expected, alone).keys() == {"small"}
        for factor in (0.0, 0.5, 2.0, -1.0):
            found = far({"large": large, "small": factor * moved(0)}, expected, alone)
            assert found == {"small": f"is {factor:.3g} of the reference" if factor else "is zero"}
        assert far({"large": large}, expected, alone) == {"small": "is missing"}
        assert far({"large": large, "small": moved(math.nan)}, expected, alone).keys() == {"small"}
    assert far({"w": moved(0)}, {"w": moved(0)}, {"w": moved(math.inf)}).keys() == {"w"}


def test_what_is_rounding_or_nothing_at_all_is_not_called_wrong() -> None:
    """One process's narrow gradient of a key's bias, say, tells nothing of it but how large its noise is."""
    sizes = {"w": torch.full((100,), 1e3), "bias": torch.tensor([1e-9, 0.0]), "unused": torch.zeros(2)}
    alone = {**sizes, "w": 0.99 * sizes["w"], "bias": torch.tensor([1e-3, 0.0])}
    for noise in (0.0, -1e-3, 0.9e-3 * ROUNDING_MARGIN):
        assert far({**sizes, "bias": torch.tensor([0.0, noise])}, sizes, alone) == {}, noise
    assert far({"w": sizes["w"], "bias": sizes["bias"]}, sizes, alone) == {}
    assert far({**sizes, "bias": torch.tensor([0.0, 1.1e-3 * ROUNDING_MARGIN])}, sizes, alone).keys() == {"bias"}
    assert far({**sizes, "unused": torch.tensor([0.0, 1e-9])}, sizes, alone) == {
        "unused": "is not zero, as the reference is"
    }


def test_all_tensors_together_have_a_margin_without_a_floor() -> None:
    expected = dict.fromkeys("abc", moved(0))
    alone = dict.fromkeys("abc", moved(0.01))
    assert far(dict.fromkeys("abc", moved(0.0149, 2)), expected, alone) == {}
    assert far(dict.fromkeys("abc", moved(0.0151, 2)), expected, alone).keys() == {"all parameters"}
    assert far({**expected, "a": moved(0.0149 * 3**0.5)}, expected, alone) == {}


def test_what_one_rounding_calls_wrong_is_judged_by_the_farthest_of_several() -> None:
    """Long sums that cancel are rounded by chance: one process's may be a tenth of what another's is."""
    truth = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    lucky, usual = ({"w": (truth["w"] * (1 + by)).float()} for by in (1e-4, 1e-3))
    for apart, draws, wrong in ((1.5e-3, (), 2), (1.5e-3, (usual,), 0), (1.5e-3, (lucky,) * 6 + (usual,), 0)):
        assert sum(wrong_elements({"w": (truth["w"] * (1 - apart)).float()}, lucky, truth, *draws).values()) == wrong
    late = (lucky,) * (DRAWS - 1) + (usual,)
    assert wrong_elements({"w": (truth["w"] * 0.9985).float()}, lucky, truth, *late), "drawn more often than it says"
    assert wrong_elements({"w": (truth["w"] * 0.995).float()}, lucky, truth, usual), "beyond its margin of all"
    floor = FLOOR * torch.finfo(torch.bfloat16).eps
    expected, one, other = ({"w": moved(by), "large": torch.full((100,), 1e3)} for by in (0.0, 0.01, 0.1))
    other["large"] = one["large"] = 0.9 * one["large"]
    for by, alone, names in (
        (0.1, [one], {"w"}),
        (0.1, [one, other], set()),
        (0.99 * (0.2 + floor), [one, other], set()),
    ):
        assert far({**expected, "w": moved(by, 2)}, expected, *alone).keys() == names, (by, len(alone))
    assert far({**expected, "w": moved(1.01 * (0.2 + floor), 2)}, expected, one, other).keys() == {"w"}


def test_right_gradients_are_right_however_long_a_model_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be learnt of random tokens: queries and keys mean ever less, and what is left of them is rounding."""
    wrong = {1: 0, DRAWS: 0}
    for dtype, narrow in ((torch.float32, None), (torch.bfloat16, torch.bfloat16)):
        for found, expected, alone in while_training(dtype, steps=120, every=6):
            for draws in wrong:
                monkeypatch.setattr(parity, "DRAWS", draws)
                wrong[draws] += any(one.wrong for one in compare(found, expected, alone, narrow))
    assert wrong[1] > 0, "this training shows nothing"
    assert wrong[DRAWS] == 0


def while_training(dtype: torch.dtype, steps: int, every: int) -> Iterator[tuple[Tensors, Tensors, Alone]]:
    """Yield gradients of attention block by block, those of torch's in float32, and roundings of these."""
    cuts = [slice(start, start + 16) for start in range(0, SHAPES["tiny"].sequence, 16)]
    tiles = [Tile(rows, keys, causal=keys == rows) for rows in cuts for keys in cuts if keys.start <= rows.start]
    in_blocks = RingAttention(None, CpuFlash(), [tiles])

    def gradients(dtype: torch.dtype, draw: int, core: Core | None = None) -> Tensors:
        alone = build(SHAPES["tiny"], 0, torch.device("cpu"), dtype)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(model.get_parameter(name))
                parameter.copy_(draw_moved(parameter, name, draw))
        for layer in alone.layers if core else ():
            layer.get_submodule("attention").core = core  # type: ignore[assignment]
        loss_of(alone, tokens).backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}

    model = build(SHAPES["tiny"], 0, torch.device("cpu"), dtype)
    optimizer = make_optimizer(model.parameters(), dtype)
    for number in range(steps):
        tokens = draw_tokens(SHAPES["tiny"], 4, 0, number)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number % every == every - 1:
            yield gradients(dtype, 0, in_blocks), gradients(torch.float32, 0), cache(gradients)


def test_weights_are_moved_by_a_last_bit_either_way_and_another_way_in_each_draw() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.linspace(-2, 2, 1001).to(dtype)
        assert draw_moved(weight, "w", 0) is weight
        first, again, second, other = (draw_moved(weight, *of) for of in (("w", 1), ("w", 1), ("w", 2), ("v", 1)))
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(first, other)
        apart = (first.double() - weight.double()).abs() / weight.double().abs().clamp(min=1e-9)
        assert 0 < float(apart.amax()) <= torch.finfo(dtype).eps
        up = (first > weight).sum() / (first != weight).sum()
        assert first.dtype == dtype
        assert 0.4 < float(up) < 0.6


def test_bits_that_differ_are_counted_and_a_multiple_is_named() -> None:
    expected = {"a": REFERENCE, "b": REFERENCE}
    for value, wrong in ((4.0, {}), (4.0 + 2**-21, {"a": 1}), (math.nan, {"a": 1})):
        found = {"a": with_element(0, value), "b": REFERENCE}
        compared = compare_elements(found, expected, tolerance=0.0)
        assert {one.name: one.wrong for one in compared if one.wrong} == wrong, value
    [one] = [
        one for one in compare_elements({"a": REFERENCE, "b": 2 * REFERENCE}, expected, tolerance=0.0) if one.wrong
    ]
    assert str(one) == "b is 2 of the reference"


Mean = Callable[[Tensor], Tensor]


def not_divided(parts: Tensor) -> Tensor:
    """Return the sums of all ranks' parts (n) by a ring's chunks (n), each begun by another rank, rounded at each.

    So a hybrid step takes them over its data axes.
    """
    return reduce(torch.add, [parts.roll(-rank) for rank in range(len(parts))])


def divided_first(parts: Tensor) -> Tensor:
    return not_divided(parts * (1 / len(parts)))


def divided_in_the_type(parts: Tensor) -> Tensor:
    """Return the means as NCCL takes them: the factor is rounded too."""
    return not_divided(parts * torch.tensor(1 / len(parts), dtype=parts.dtype))


MEANS: list[Mean] = [divided_first, divided_in_the_type, not_divided]


def filled(ranks: int, dtype: torch.dtype, mean: Mean) -> tuple[Tensor, float]:
    """Return what each rank (n) fills in a timed Linear's gradient, and what comes of all."""
    divisor = 1 if mean is not_divided else ranks
    fills, expected = [], 0.0
    for rank in range(ranks):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
        make_timed(model, 1.0, TimedCompute(torch.device("cpu")))
        fill_distinct_gradients(model, rank, ranks, divisor)
        [linear] = [module for module in model.modules() if isinstance(module, TimedLinear)]
        fills.append(linear.fill)
        expected = linear.mean_fill * ranks / divisor
    return torch.tensor(fills, dtype=dtype), expected


@pytest.mark.parametrize("mean", MEANS)
def test_fills_are_right_in_whatever_order_ranks_are_summed_and_a_rank_that_is_missing_is_seen(mean: Mean) -> None:
    for ranks in (2, 3, 5, 8, 13, 16, 26, 31, 96):
        for dtype in DTYPES:
            parts, expected = filled(ranks, dtype, mean)
            for microbatches in (1, 2, 3):
                found = mean(reduce(torch.add, [parts] * microbatches))
                assert count_unfilled(found, microbatches * expected, ranks) == 0, (ranks, dtype, microbatches)
            for missing in range(ranks if ranks <= 26 else 0):
                rest = with_element(missing, 0, parts)
                assert count_unfilled(mean(rest), expected, ranks) == ranks, (ranks, dtype, missing)
            parts[: ranks // 2] = 0
            assert count_unfilled(mean(parts), expected, ranks) == ranks, (ranks, dtype, "half")


def test_fills_that_differ_by_the_rounding_of_a_factor_are_right_and_no_number_is_wrong() -> None:
    """With numbers of ranks as fills: DDP's factor is rounded before the sum."""
    for ranks in (5, 6, 7, 9):
        found, expected = divided_first(torch.arange(1.0, ranks + 1)), (ranks + 1) / 2
        assert bool((found != expected).any())
        assert count_unfilled(found, expected, ranks) == 0
    assert count_unfilled(None, 3.0, 2) == 1
    assert count_unfilled(torch.tensor([3.0, math.nan, math.inf, -3.0]), 3.0, 2) == 3
