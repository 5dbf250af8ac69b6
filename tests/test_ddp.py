"""The DDP step trains as one process would, its gate sees every way in which it might not, and it says what it does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from bench.cases import make_case
from bench.messages import Outcome
from bench.plan import Measure
from bench.progress import Progress
from bench.runner import run_case
from bench.subject import Description
from bench.world import World
from workloads.ddp import DdpStep, prepare
from workloads.model import Shape, build, draw_tokens, loss_of

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "microbatch": 3, "bucket_mb": 25.0}
NUM_SMALL = 30_080  # 2 (12 h^2 + 13 h) + (vocabulary + sequence) h + 2 h + h vocabulary with h = 32
SMALL_MICROBATCH, SMALL_VOCABULARY = 3, 64


def small(world: World, **params: Any) -> DdpStep:
    return prepare(world, **{**SMALL, **params})


def weights_of(step: DdpStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step._model.parameters()]


# ---- what ranks do


def wrong_after(world: World, steps: int, params: dict[str, Any]) -> list[int]:
    """Return how much is wrong after each step."""
    step = small(world, **params)
    wrong = []
    for _ in range(steps):
        step.reset()
        step.step()
        wrong.append(step.check())
    return wrong


def distance_from_one_process(world: World, steps: int) -> tuple[float, float]:
    """Return how far weights are, after some steps, from those of one process that trains on the whole batches, and
    how far they have come.
    """
    step = small(world)
    alone = build(step._shape, world.seed, world.device)
    start = [parameter.detach().clone() for parameter in alone.parameters()]
    optimizer = torch.optim.AdamW(alone.parameters())
    for number in range(1, steps + 1):
        step.reset()
        step.step()
        optimizer.zero_grad()
        tokens = draw_tokens(step._shape, world.size * SMALL_MICROBATCH, world.seed, number)
        loss_of(alone, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ours, theirs = weights_of(step), [parameter.detach() for parameter in alone.parameters()]
    far = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    come = min(float((a - b).abs().max()) for a, b in zip(theirs, start, strict=True))
    return far, come


def drawn(world: World) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return this rank's tokens of the first two steps, and the whole batches."""
    step = small(world)
    mine, batches = [], []
    for _ in range(2):
        step.reset()
        mine.append(step._mine.tolist())
        batches.append(step._batch.tolist())
    return mine, batches


def changed_by_check(world: World) -> tuple[bool, bool, list[int]]:
    """Return whether a check moves weights or the random state, and what three checks in a row find."""
    step = small(world)
    step.reset()
    step.step()
    before, state = weights_of(step), torch.get_rng_state()
    wrong = [step.check() for _ in range(3)]
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights_of(step), strict=True))
    return moved, not torch.equal(state, torch.get_rng_state()), wrong


def described(world: World, params: dict[str, Any]) -> Description:
    return small(world, **params).describe()


def measured(world: World, params: dict[str, Any]) -> Outcome:
    case = make_case("workload.ddp", "workloads.ddp:prepare", {**SMALL, **params})
    return run_case(case, world, Measure(warmup=2, max_iterations=6), 30.0, Progress())


def num_buckets(world: World, bucket_mb: float) -> int:
    """Return how many gradient buckets go round in a step."""
    seen = []

    def count(buffer: Tensor) -> Tensor:
        seen.append(len(buffer))
        return buffer / world.size

    step = _hooked(small(world, bucket_mb=bucket_mb), world, count)
    step.reset()
    step.step()  # the first step finds the order of gradients, after which DDP makes its buckets anew
    seen.clear()
    step.step()
    assert sum(seen) == NUM_SMALL
    return len(seen)


# ---- mutants: each makes one thing wrong, on rank 1 or on all


def wrong_of_mutant(world: World, mutant: str) -> int:
    """Return how much is wrong after two steps of a mutant."""
    return MUTANTS[mutant](world)


def _stepped(step: DdpStep) -> DdpStep:
    for _ in range(2):
        step.reset()
        step.step()
    return step


def _gradients_stay_local(world: World) -> int:
    """DDP never sums, which shows in the weights: they part."""
    step = small(world)
    with step._ddp.no_sync():
        return _stepped(step).check()


def _gradients_stay_local_in_the_check_alone(world: World) -> int:
    """Weights are alike, since the steps were right: only the gradients can tell."""
    step = _stepped(small(world))
    with step._ddp.no_sync():
        return step.check()


def _hooked(step: DdpStep, world: World, change: Callable[[Tensor], Tensor]) -> DdpStep:
    """Let DDP sum what ``change`` makes of each bucket."""

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        changed = change(bucket.buffer())
        dist.all_reduce(changed, group=world.group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(changed)
        return done

    step._ddp.register_comm_hook(None, hook)
    return step


def _gradients_are_summed_and_not_averaged(world: World) -> int:
    return _stepped(_hooked(small(world), world, lambda buffer: buffer)).check()


def _gradients_travel_in_bfloat16(world: World) -> int:
    return _stepped(_hooked(small(world), world, lambda buffer: (buffer / world.size).bfloat16().float())).check()


def averaged_by_hook(world: World) -> int:
    """Return how much is wrong where the hook does what DDP does: the mutants' own machinery is right."""
    return _stepped(_hooked(small(world), world, lambda buffer: buffer / world.size)).check()


def _one_rank_draws_other_tokens(world: World) -> int:
    step = _stepped(small(world))
    if world.rank == 1:
        step._mine = (step._mine + 1) % SMALL_VOCABULARY
    return step.check()


def _both_ranks_draw_the_same_tokens(world: World) -> int:
    step = _stepped(small(world))
    step._mine = step._batch[:SMALL_MICROBATCH]
    return step.check()


def _one_weight_is_an_ulp_off(world: World) -> int:
    step = _stepped(small(world))
    if world.rank == 1:
        weight = next(step._model.parameters()).detach().view(-1)
        weight[7] = torch.nextafter(weight[7], torch.tensor(1.0))
    return step.check()


def _one_rank_skips_the_optimizer(world: World) -> int:
    step = small(world)
    if world.rank == 1:
        step._optimizer.step = lambda: None  # type: ignore[assignment,method-assign,misc]
    return _stepped(step).check()


def _one_parameter_is_left_out(world: World) -> int:
    """Its gradient is there, of this rank's tokens alone."""
    step = small(world)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(step._model, ["head.weight"])  # type: ignore[no-untyped-call]
    step._ddp = DistributedDataParallel(step._model, process_group=world.group)
    step.reset()
    return step.check()


def _every_rank_is_a_group_of_its_own(world: World) -> int:
    """Ranks that do not know of each other: each is alike itself, but its gradients are of its own tokens."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    wrong = _stepped(small(replace(world, group=groups[world.rank]))).check()
    dist.destroy_process_group(groups[world.rank])
    return wrong


MUTANTS: dict[str, Callable[[World], int]] = {
    "gradients stay local": _gradients_stay_local,
    "gradients stay local in the check alone": _gradients_stay_local_in_the_check_alone,
    "gradients are summed, not averaged": _gradients_are_summed_and_not_averaged,
    "gradients travel in bfloat16": _gradients_travel_in_bfloat16,
    "one rank draws other tokens": _one_rank_draws_other_tokens,
    "both ranks draw the same tokens": _both_ranks_draw_the_same_tokens,
    "one weight of one rank is an ulp off": _one_weight_is_an_ulp_off,
    "one rank skips the optimizer": _one_rank_skips_the_optimizer,
    "one parameter is left out": _one_parameter_is_left_out,
    "every rank is a group of its own": _every_rank_is_a_group_of_its_own,
}


# ---- tests


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"bucket_mb": 0.001},  # a bucket for nearly every parameter
        {"layers": 1, "hidden": 8, "heads": 1, "vocabulary": 16, "microbatch": 1},
        {"sequence": 1, "microbatch": 1},
        {"layers": 4, "hidden": 128, "sequence": 64, "vocabulary": 512, "microbatch": 4},  # the defaults
    ],
    ids=str,
)
def test_weights_are_alike_and_gradients_are_those_of_one_process(two_ranks: Ranks, params: dict[str, Any]) -> None:
    assert two_ranks.call("test_ddp:wrong_after", steps=3, params=params) == [[0, 0, 0]] * 2


def test_training_goes_where_one_process_would_go(two_ranks: Ranks) -> None:
    """AdamW moves by about its learning rate, 1e-3, whatever the gradient's size; roundings of it part by far less."""
    for far, come in two_ranks.call("test_ddp:distance_from_one_process", steps=3):
        assert come > 1e-3
        assert far < 1e-4


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_is_caught(two_ranks: Ranks, mutant: str) -> None:
    assert max(two_ranks.call("test_ddp:wrong_of_mutant", mutant=mutant)) > 0


def test_the_mutants_own_hook_is_right_when_it_averages(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ddp:averaged_by_hook") == [0, 0]


def test_one_ulp_is_one_wrong_element_on_the_rank_that_is_off(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ddp:wrong_of_mutant", mutant="one weight of one rank is an ulp off") == [0, 1]


def test_ranks_share_the_batch_that_any_other_layout_would_draw(two_ranks: Ranks) -> None:
    (first, batches), (second, same) = two_ranks.call("test_ddp:drawn")
    shape = Shape(layers=2, hidden=32, heads=4, sequence=16, vocabulary=64)
    assert batches == same == [draw_tokens(shape, 6, seed=0, step=number).tolist() for number in (1, 2)]
    for number in range(2):
        assert first[number] + second[number] == batches[number]
    assert first[0] != first[1]


def test_a_check_disturbs_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_ddp:changed_by_check") == [(False, False, [0, 0, 0])] * 2


def test_bytes_are_counted_in_closed_form(two_ranks: Ranks) -> None:
    """Of float32: two ranks' ring sends 2 (n-1)/n = 1 times the gradients."""
    for description in two_ranks.call("test_ddp:described", params={}):
        assert description.details["parameters"] == NUM_SMALL
        assert description.details["gradient_bytes"] == 4 * NUM_SMALL
        assert description.details["send_bytes_formula"] == 4 * NUM_SMALL
        assert description.details["bucket_mb"] == 25.0


@pytest.mark.parametrize(("microbatch", "sequence"), [(3, 16), (1, 5)])
def test_a_rate_is_of_the_tokens_of_all_ranks(two_ranks: Ranks, microbatch: int, sequence: int) -> None:
    params = {"microbatch": microbatch, "sequence": sequence}
    for description in two_ranks.call("test_ddp:described", params=params):
        [work] = description.work
        assert (work.name, work.amount, work.unit) == ("tokens_per_second", 2 * microbatch * sequence, "tokens/s")
        assert description.details["tokens_per_step"] == work.amount
        assert description.headline == "step_time"


def test_the_runner_measures_it_like_any_other_subject(two_ranks: Ranks) -> None:
    outcome, _ = two_ranks.call("test_ddp:measured", params={})
    assert (outcome.status, outcome.check.wrong, outcome.headline) == ("ok", 0, "step_time")
    assert len(outcome.seconds) == 6
    assert min(outcome.seconds) > 1e-4


def test_small_buckets_are_really_many(two_ranks: Ranks) -> None:
    few, many = (two_ranks.call("test_ddp:num_buckets", bucket_mb=bucket_mb)[0] for bucket_mb in (25.0, 0.001))
    assert few == 1
    assert many > 10
