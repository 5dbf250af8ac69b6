"""Every training step computes what one process would, its gate sees where it does not, and bytes are as counted.

What ranks do here is called by the tests of each parallelism too: ``two_ranks.call("test_training:wrong_after", ...)``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

from bench.cases import make_case
from bench.messages import Outcome
from bench.plan import Measure
from bench.progress import Progress
from bench.runner import load_target, run_case
from bench.subject import Description
from bench.world import World
from workloads.communication import Silenced, counted, fake_twins, group_of
from workloads.costs import sent_bytes
from workloads.definitions import DEFINITIONS
from workloads.layout import local
from workloads.model import build, draw_tokens, loss_of
from workloads.shapes import Shape, num_parameters
from workloads.training import TrainingStep

Params = dict[str, Any]

OF_NAME = {definition.name.removeprefix("workload."): definition for definition in DEFINITIONS}
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "sequence": 16, "vocabulary": 64, "microbatch": 2}
ON_TWO: dict[str, tuple[str, Params]] = {
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "hsdp that shards": ("hsdp", {}),
    "hsdp that replicates": ("hsdp", {"shard": 1}),
    "tp": ("tp", {}),
    "tp_sp": ("tp_sp", {}),
    "tp_fsdp that splits": ("tp_fsdp", {}),
    "tp_fsdp that shards": ("tp_fsdp", {"tp": 1}),
}
ON_FOUR: dict[str, tuple[str, Params]] = {
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "hsdp": ("hsdp", {}),
    "tp": ("tp", {"kv_heads": 4}),
    "tp_sp": ("tp_sp", {"kv_heads": 4}),
    "tp_fsdp": ("tp_fsdp", {}),
    "tp_fsdp that splits over all": ("tp_fsdp", {"tp": 4, "kv_heads": 4}),
}
KINDS = (
    ("ddp", "zero1", "hsdp that replicates"),
    ("zero2", "zero3", "hsdp that shards", "tp_fsdp that shards"),
    ("tp", "tp_sp", "tp_fsdp that splits"),
)
assert sorted(chain.from_iterable(KINDS)) == sorted(ON_TWO)
AVERAGED_ON_TWO = sorted(ON_TWO.keys() - {"tp", "tp_sp", "tp_fsdp that splits"})
HELD_BY_BOTH = sorted(ON_TWO.keys() - {"zero2", "zero3", "hsdp that shards", "tp_fsdp that shards"})


def small(world: World, name: str, params: Params) -> TrainingStep:
    """Return a small step; what is not given has the default of its definition."""
    definition = OF_NAME[name]
    defaults = {param.name: param.default for param in definition.params if not param.optional}
    step = load_target(definition.target)(world, **{**defaults, **SMALL, **params})
    assert isinstance(step, TrainingStep)
    return step


# ---- what ranks do


def wrong_after(world: World, name: str, params: Params, steps: int = 3) -> list[int]:
    """Return how much is wrong after each step."""
    step = small(world, name, params)
    wrong = []
    for _ in range(steps):
        step.reset()
        step.step()
        wrong.append(step.check())
    step.close()
    return wrong


def sent_and_expected(
    world: World, name: str, variants: list[Params]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return for each variant the bytes by axis that a step sends, and those of the closed form."""
    found = []
    for params in variants:
        step = small(world, name, params)
        for _ in range(2):
            step.step()  # DDP orders its buckets anew after the first step, and tells the others in the second
        found.append((sent_by_axis(step), dict(step.layout.expected_bytes)))
        step.close()
    return found


def sent_by_axis(step: TrainingStep) -> dict[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for call in counted(step.step, step.layout.axes):
        sent[call.axis] += sent_bytes(call.op, call.num_bytes, call.ranks)
    return {axis: value for axis, value in sent.items() if value}


def wrong_sent_and_expected(
    world: World, name: str, params: Params
) -> tuple[list[int], dict[str, float], dict[str, float]]:
    """Return how much is wrong after each of two steps, what another sends by axis, and the closed form's of it."""
    step = small(world, name, params)
    wrong = []
    for _ in range(2):
        step.reset()
        step.step()
        wrong.append(step.check())
    sent = sent_by_axis(step)
    step.close()
    return wrong, sent, dict(step.layout.expected_bytes)


def described(world: World, name: str, params: Params) -> Description:
    step = small(world, name, params)
    step.close()
    return step.describe()


def measured(world: World, name: str, params: Params) -> Outcome:
    definition = OF_NAME[name]
    defaults = {param.name: param.default for param in definition.params if not param.optional}
    case = make_case(definition.name, definition.target, {**defaults, **SMALL, **params})
    return run_case(case, world, Measure(warmup=1, max_iterations=6), 3.0, Progress())


def drawn(world: World, name: str, params: Params) -> tuple[list[Any], list[Any]]:
    """Return this rank's microbatches of the first two steps, and the whole batches."""
    step = small(world, name, params)
    mine, batches = [], []
    for _ in range(2):
        step.reset()
        mine.append([tokens.tolist() for tokens in step._mine])
        batches.append(step._batch.tolist())
    step.close()
    return mine, batches


def changed_by_check(world: World, name: str) -> tuple[bool, bool, list[int]]:
    """Return whether a later check moves weights or the random state, and what three checks in a row find."""
    step = small(world, name, {})
    step.reset()
    step.step()
    wrong = [step.check()]
    before, state = weights_of(step), torch.get_rng_state()
    wrong += [step.check() for _ in range(2)]
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights_of(step), strict=True))
    step.close()
    return moved, not torch.equal(state, torch.get_rng_state()), wrong


def weights_of(step: TrainingStep) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in step.layout.model.parameters()]


def distance_from_one_process(world: World, name: str, params: Params, steps: int) -> tuple[float, float]:
    """Return how far weights are, after some steps, from those of one process that trains on the whole batches, and
    how far they have come.
    """
    step = small(world, name, params)
    shape = step._options.shape
    alone = build(shape, world.seed, world.device)
    start = {key: parameter.detach().clone() for key, parameter in alone.named_parameters()}
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for number in range(1, steps + 1):
        step.reset()
        step.step()
        optimizer.zero_grad()
        tokens = draw_tokens(shape, step.layout.data_size * step._options.num_sequences, world.seed, number)
        loss_of(alone, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ours = step._parity._weights()
    far = max(float((ours[key] - parameter.detach()).abs().max()) for key, parameter in alone.named_parameters())
    come = min(float((parameter.detach() - start[key]).abs().max()) for key, parameter in alone.named_parameters())
    step.close()
    return far, come


# ---- mutants: each makes one thing wrong, on rank 1 or on all


class Local(Silenced):  # type: ignore[no-untyped-call]
    """While entered, a reduction gives what it would where every rank had this rank's own: nothing is exchanged."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep reductions at home, and let everything else pass."""
        name = func.name()
        group = group_of(args) if "c10d" in name and "reduce" in name else None
        if group is None:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "reduce_scatter" in name:
            functional = name.startswith("_c10d_functional")
            given, mine = (args[0], result) if functional else (args[1], args[0])
            mine.copy_(given.chunk(group.size())[group.rank()] * group.size())
        else:
            for reduced in args[0] if isinstance(args[0], list) else []:
                reduced *= group.size()
        return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.001


def _every_gradient_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    def scale(module: nn.Module, args: object, output: Tensor) -> Any:
        return _Scale.apply(output)  # type: ignore[no-untyped-call]

    step.layout.model.get_submodule("head").register_forward_hook(scale)


def _one_parameters_gradient_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        gradient = step.layout.model.get_parameter("layers.1.ffn.up.weight").grad
        assert gradient is not None
        gradient *= 1.001
        return loss

    step._forward_backward = forward_backward  # type: ignore[method-assign]


def _a_microbatch_is_dropped(step: TrainingStep, world: World) -> None:
    step._mine = step._mine[:-1]


def _a_microbatch_is_taken_twice(step: TrainingStep, world: World) -> None:
    step._mine = (step._mine[0], *step._mine[:-1])


def _one_rank_has_other_tokens(step: TrainingStep, world: World) -> None:
    if world.rank == 1:
        step._mine = tuple((tokens + 1) % step._options.shape.vocabulary for tokens in step._mine)


def _targets_are_not_moved(step: TrainingStep, world: World) -> None:
    step._mine = tuple(tokens[:, :-1].repeat_interleave(2, dim=1)[:, : tokens.shape[1]] for tokens in step._mine)


def _a_missing_gradient(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        step.layout.model.get_parameter("layers.0.attention.v.weight").grad = None
        return loss

    step._forward_backward = forward_backward  # type: ignore[method-assign]


def _every_loss_is_a_thousandth_larger(step: TrainingStep, world: World) -> None:
    right = step._forward_backward

    def forward_backward() -> Tensor | None:
        loss = right()
        assert loss is not None
        return loss * 1.001

    step._forward_backward = forward_backward  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[TrainingStep, World], None]] = {
    "every gradient is a thousandth larger": _every_gradient_is_a_thousandth_larger,
    "one parameter's gradient is a thousandth larger": _one_parameters_gradient_is_a_thousandth_larger,
    "a microbatch is dropped": _a_microbatch_is_dropped,
    "a microbatch is taken twice": _a_microbatch_is_taken_twice,
    "one rank has other tokens": _one_rank_has_other_tokens,
    "targets are not moved": _targets_are_not_moved,
    "a gradient is missing": _a_missing_gradient,
    "every loss is a thousandth larger": _every_loss_is_a_thousandth_larger,
}


def wrong_of_mutant(world: World, name: str, params: Params, mutant: str) -> tuple[int, int]:
    """Return how much is wrong after a right step, and then in a check alone that a mutant makes wrong."""
    step = small(world, name, {"accumulation": 2, **params})
    step.reset()
    step.step()
    right = step.check()
    step.reset()
    step.step()
    MUTANTS[mutant](step, world)
    wrong = step.check()
    step.close()
    return right, wrong


def wrong_where_nothing_is_reduced(world: World, name: str, params: Params) -> tuple[int, int]:
    """Return how much is wrong where gradients stay local in the check alone, and in steps too."""
    found = []
    for late in (True, False):
        step = small(world, name, params)
        step.reset()
        if late:
            step.step()
            assert step.check() == 0
        twins = fake_twins(step.layout.axes)
        with Local(twins):
            step.step()
            found.append(step.check())
        step.close()
    return found[0], found[1]


def wrong_where_one_bit_is_changed(world: World, name: str, params: Params) -> tuple[int, int]:
    """Return how much is wrong before and after rank 1 changes the last bit of one element it holds."""
    step = small(world, name, params)
    step.reset()
    step.step()
    right = step.check()
    if world.rank == 1:
        weights = local(step.layout.model.get_parameter("tokens.weight").detach()).view(torch.int32)
        weights[3, 5] ^= 1
    wrong = step.check()
    step.close()
    return right, wrong


def wrong_where_one_rank_does_not_update(world: World, name: str, params: Params) -> int:
    """Return how much is wrong after rank 1 left its parameters as they were, gradients all right."""
    step = small(world, name, params)
    right = step.layout.optimizer.step

    def update(closure: Any = None) -> None:
        before = weights_of(step)
        right()
        if world.rank == 1:
            for parameter, weights in zip(step.layout.model.parameters(), before, strict=True):
                local(parameter.detach()).copy_(weights)

    step.layout.optimizer.step = update  # type: ignore[method-assign,assignment]
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def wrong_with_another_learning_rate(world: World, name: str, params: Params) -> int:
    """Return how much is wrong where all ranks agree on updates a tenth too large."""
    step = small(world, name, params)
    for group in step.layout.optimizer.param_groups:
        group["lr"] *= 1.1
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def wrong_where_one_rank_starts_elsewhere(world: World, name: str, params: Params) -> int:
    """Return how much is wrong where rank 1 begins with one weight of another model's."""
    step = small(world, name, params)
    if world.rank == 1:
        local(step.layout.model.get_parameter("layers.0.ffn.down.weight").detach())[0, 0] += 0.01
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


# ---- tests


def both(ranks: Ranks, function: str, case: tuple[str, Params], **arguments: Any) -> list[Any]:
    name, params = case
    return ranks.call(f"test_training:{function}", name=name, params=params, **arguments)


def spread(wrongs: Iterable[str]) -> list[tuple[str, str]]:
    """Return cases to try what can be wrong on: each with one step of every kind, each step with one and more."""
    pairs = [(kind[i % len(kind)], wrong) for i, wrong in enumerate(wrongs) for kind in KINDS]
    tried = {case for case, _ in pairs}
    return pairs + [(case, wrong) for case, wrong in zip(sorted(ON_TWO.keys() - tried), cycle(wrongs), strict=False)]


@pytest.mark.parametrize(
    "more", [{"recipe": "llama"}, {"recipe": "gpt", "precision": "bfloat16", "accumulation": 2}], ids=str
)
@pytest.mark.parametrize("case", ON_TWO)
def test_each_step_computes_what_one_process_would(two_ranks: Ranks, case: str, more: Params) -> None:
    name, params = ON_TWO[case]
    assert both(two_ranks, "wrong_after", (name, {**params, **more}), steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize("case", ON_TWO)
def test_training_goes_where_one_process_would_go(two_ranks: Ranks, case: str) -> None:
    """AdamW moves by about its learning rate, 1e-3, whatever the gradient's size; roundings of it part by far less."""
    name, params = ON_TWO[case]
    for far, come in both(two_ranks, "distance_from_one_process", (name, {**params, "accumulation": 2}), steps=3):
        assert come > 1e-3
        assert far < 1e-4


@pytest.mark.parametrize(
    ("case", "how"), [("ddp", "selective"), ("zero3", "full"), ("tp_sp", "selective"), ("tp_sp", "full")]
)
def test_each_step_is_right_where_activations_are_computed_again(two_ranks: Ranks, case: str, how: str) -> None:
    name, params = ON_TWO[case]
    params = {**params, "checkpointing": how, "accumulation": 2}
    assert both(two_ranks, "wrong_after", (name, params), steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize(
    "params",
    [
        {"layers": 1, "microbatch": 1, "vocabulary": 17},
        {"sequence": 1, "microbatch": 1},
        {"accumulation": 3, "microbatch": 1},
        {"hidden": 30, "heads": 3, "kv_heads": 3, "ffn": 41, "vocabulary": 61, "sequence": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_odd_sizes_are_trained_right(two_ranks: Ranks, name: str, params: Params) -> None:
    assert both(two_ranks, "wrong_after", (name, params), steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize(("case", "mutant"), spread(MUTANTS))
def test_every_mutant_is_caught(two_ranks: Ranks, case: str, mutant: str) -> None:
    found = both(two_ranks, "wrong_of_mutant", ON_TWO[case], mutant=mutant)
    assert [right for right, _ in found] == [0, 0]
    assert max(wrong for _, wrong in found) > 0


@pytest.mark.parametrize("case", [case for case in ON_TWO if case != "tp_fsdp that splits"])
def test_gradients_that_stay_local_are_caught(two_ranks: Ranks, case: str) -> None:
    found = both(two_ranks, "wrong_where_nothing_is_reduced", ON_TWO[case])
    assert max(late for late, _ in found) > 0
    assert max(early for _, early in found) > 0


@pytest.mark.parametrize("case", HELD_BY_BOTH)
def test_one_bit_is_one_wrong_element_on_the_rank_that_is_off(two_ranks: Ranks, case: str) -> None:
    assert both(two_ranks, "wrong_where_one_bit_is_changed", ON_TWO[case]) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("case", "function"),
    spread(
        (
            "wrong_where_one_rank_does_not_update",
            "wrong_with_another_learning_rate",
            "wrong_where_one_rank_starts_elsewhere",
        )
    ),
)
def test_updates_are_compared_too(two_ranks: Ranks, case: str, function: str) -> None:
    """Where gradients, losses and the ranks' agreement say nothing: each rank's weights are what it computes with."""
    assert max(both(two_ranks, function, ON_TWO[case])) > 0


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "hsdp", "tp_sp"])
def test_a_later_check_disturbs_nothing(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.call("test_training:changed_by_check", name=name) == [(False, False, [0, 0, 0])] * 2


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
@pytest.mark.parametrize("case", [case for case in ON_TWO if case != "zero1"])
def test_bytes_sent_are_those_of_the_closed_form(two_ranks: Ranks, case: str, recipe: str) -> None:
    """Of an odd vocabulary too, whose embedding and head FSDP pads."""
    name, params = ON_TWO[case]
    again = "none" if name.startswith("tp") else "full"  # a split layer's sums are computed again with it
    one, other = ("float32", "bfloat16") if recipe == "gpt" else ("bfloat16", "float32")
    variants = [
        {**params, "recipe": recipe, "precision": one, "vocabulary": 64},
        {**params, "recipe": recipe, "precision": other, "vocabulary": 61, "accumulation": 2, "checkpointing": again},
    ]
    for found in two_ranks.call("test_training:sent_and_expected", name=name, variants=variants):
        for given, (sent, expected) in zip(variants, found, strict=True):
            assert sent == {axis: value for axis, value in expected.items() if value}, given
            assert any(sent.values())


@pytest.mark.parametrize("case", ON_TWO)
def test_ranks_share_the_batch_that_one_process_would_draw(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    params = {**params, "microbatch": 2, "accumulation": 3}
    (first, batches), (second, same) = both(two_ranks, "drawn", (name, params))
    shape = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=128, sequence=16, vocabulary=64)
    sequences = 12 if case in AVERAGED_ON_TWO else 6
    assert batches == same == [draw_tokens(shape, sequences, seed=0, step=number).tolist() for number in (1, 2)]
    for number in range(2):
        assert [len(microbatch) for microbatch in first[number]] == [2, 2, 2]
        flat = [list(chain.from_iterable(microbatches[number])) for microbatches in (first, second)]
        if case in AVERAGED_ON_TWO:
            assert flat[0] + flat[1] == batches[number]
        else:
            assert flat[0] == flat[1] == batches[number]


@pytest.mark.parametrize("case", ["ddp", "zero3", "hsdp that shards", "tp", "tp_fsdp that shards"])
def test_ranks_describe_a_step_alike(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    one, other = both(two_ranks, "described", (name, {**params, "accumulation": 3, "sequence": 4}))
    assert repr(one) == repr(other)
    tokens = (2 if case in AVERAGED_ON_TWO else 1) * 2 * 3 * 4
    rate, mfu = one.work
    assert (rate.name, rate.amount, rate.unit) == ("tokens_per_second", tokens, "tokens/s")
    assert (one.headline, one.details["tokens_per_step"]) == ("step_time", tokens)
    shape = Shape(recipe="gpt", layers=2, hidden=32, heads=4, kv_heads=2, ffn=128, sequence=4, vocabulary=64)
    assert one.details["parameters"] == num_parameters(shape)
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 128) + 32 * 64
    flops = tokens * (6 * weights + 12 * 2 * 32 * 4) / 2
    assert one.details["flops_per_rank"] == flops
    assert (mfu.name, mfu.amount) == ("mfu", flops / one.details["peak"]["flops_per_second"])
    assert one.details["peak"]["flops_per_second"] > 1e6
    assert not any("timed compute" in note for note in one.notes)


@pytest.mark.parametrize("case", ON_TWO)
def test_timed_compute_averages_its_fills(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    params = {**params, "compute": "timed:1ms", "accumulation": 2}
    assert both(two_ranks, "wrong_after", (name, params), steps=2) == [[0, 0]] * 2


@pytest.mark.parametrize("case", ["ddp", "zero3"])
def test_timed_compute_averages_its_fills_in_bfloat16(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    params = {**params, "compute": "timed:1ms", "accumulation": 3, "precision": "bfloat16"}
    assert both(two_ranks, "wrong_after", (name, params), steps=2) == [[0, 0]] * 2
    found = both(two_ranks, "wrong_where_nothing_is_reduced", (name, params))
    assert max(late for late, _ in found) > 0


@pytest.mark.parametrize("case", ["ddp", "zero3"])
def test_timed_compute_sees_gradients_that_stay_local(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    found = both(two_ranks, "wrong_where_nothing_is_reduced", (name, {**params, "compute": "timed:1ms"}))
    assert max(late for late, _ in found) > 0
    assert max(early for _, early in found) > 0


@pytest.mark.parametrize("case", ["ddp", "zero3", "tp"])
def test_timed_compute_says_so_and_has_no_peak(two_ranks: Ranks, case: str) -> None:
    name, params = ON_TWO[case]
    one, other = both(two_ranks, "described", (name, {**params, "compute": "timed:1ms"}))
    assert repr(one) == repr(other)
    assert [work.name for work in one.work] == ["tokens_per_second"]
    assert one.details["peak"] is None
    assert any(note.startswith("timed compute: ") for note in one.notes)


@pytest.mark.parametrize("name", ["ddp", "tp"])
def test_the_runner_measures_a_step_like_any_other_subject(two_ranks: Ranks, name: str) -> None:
    outcome, _ = two_ranks.call("test_training:measured", name=name, params={})
    assert (outcome.status, outcome.check.wrong, outcome.headline) == ("ok", 0, "step_time")
    assert len(outcome.seconds) == 6
    axis = "tp" if name == "tp" else "dp"
    assert outcome.explained[f"bytes_ratio.{axis}"].value == 1


@pytest.mark.slow
def test_four_ranks_train_as_one_process_would_and_send_what_the_closed_form_says() -> None:
    odd = {"hidden": 40, "ffn": 44, "vocabulary": 61}
    with Ranks(4) as ranks:
        for name, params in ON_FOUR.values():
            for more in ({}, {"recipe": "llama", "precision": "bfloat16", "accumulation": 2}):
                variant = {**odd, **params, **more}
                for wrong, sent, expected in both(ranks, "wrong_sent_and_expected", (name, variant)):
                    assert wrong == [0, 0], (name, variant)
                    if name != "zero1":
                        assert sent == {axis: value for axis, value in expected.items() if value}, (name, variant)
                        assert sent


@pytest.mark.slow
def test_four_ranks_see_gradients_that_stay_local_and_ranks_that_stay_behind() -> None:
    with Ranks(4) as ranks:
        for case in ("zero1", "hsdp", "tp_fsdp"):
            found = both(ranks, "wrong_where_nothing_is_reduced", ON_FOUR[case])
            assert max(late for late, _ in found) > 0, case
            assert max(early for _, early in found) > 0, case
            assert max(both(ranks, "wrong_where_one_rank_does_not_update", ON_FOUR[case])) > 0, case
