"""Each parallelism sends, gathers, holds and gives back what its name says, however its options are set."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_steps import OF_NAME, Params, sent_and_expected, small

from parbench.bench.rank.runner import load_target
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.step.layout import local
from parbench.workloads.step.sent_bytes import SentCall, counted
from parbench.workloads.step.training_step import TrainingStep

NUM_SMALL = 27_936  # 2 (2 h^2 + h^2 + 8 h^2 + 4 h + 3 h + h / 2 + 4 h) + (2 * 64 + 16) h + 2 h with h = 32
ACTIVATION = 2 * 16 * 32 * 4
FSDP = ("zero2", "zero3", "hsdp")
COMPRESSED = {"grad_compression": "bf16"}
DISTRIBUTED = {"optimizer": "distributed"}
Variants = list[tuple[str, Params]]
MAKE_GROUPS = ["hsdp", "tp_fsdp", "ep_step", "pp", "cp", "hybrid"]


def stepped(step: TrainingStep) -> TrainingStep:
    step.reset()
    step.step()
    assert step.check() == 0
    return step


def calls_of(world: World, variants: Variants) -> list[list[SentCall]]:
    """Return the calls of a third step of each: the first finds the order of gradients, by which DDP makes its buckets
    anew.
    """
    found = []
    for name, params in variants:
        step = small(world, name, params)
        for _ in range(2):
            step.step()
        found.append(list(counted(step.step, step.layout.axes)))
        step.close()
    return found


def wrong_of_narrower_gradients(world: World) -> dict[str, int]:
    """Return how much is wrong where gradients are summed in float8, of two microbatches, and of one of them."""
    step = stepped(small(world, "ddp", {**COMPRESSED, "accumulation": 2}))
    found, mine = {"bfloat16": step.check()}, step._mine
    step._mine = (mine[0], mine[0])
    found["one twice"] = step.check()
    step._mine = mine
    weight = step.layout.model.get_parameter("layers.0.ffn.up.weight")
    weight.register_hook(lambda gradient: gradient.to(torch.float8_e4m3fn).to(gradient.dtype))  # type: ignore[no-untyped-call]
    found["float8 of one"] = step.check()
    return found


def zero1_bytes(world: World, variants: list[Params]) -> list[tuple[float, float, float]]:
    """Return the bytes of a step, those of the formula, and those of what the note says torch does."""
    found = []
    for params in variants:
        [(sent, expected)] = sent_and_expected(world, "zero1", [params])
        step = small(world, "zero1", params)
        psi, e = num_parameters(step.spec.shape), step.spec.element_bytes
        half = (world.size - 1) / world.size
        torchs = {"dp": psi * e * (2 * half * params["accumulation"] + 1)}
        found.append((sent["dp"], expected["dp"], torchs["dp"]))
    return found


def zero1_moments_and_notes(world: World, params: Params) -> tuple[int, int, tuple[str, ...]]:
    """Return the parameters of the model, the elements of first moments held after a step, and the row's notes."""
    step = small(world, "zero1", params)
    step.step()
    inner = step.layout.optimizer.optim  # type: ignore[attr-defined]
    held = [state["exp_avg"] for state in inner.state.values()]
    moments = sum(moment.numel() for moment in held if isinstance(moment, Tensor))
    return num_parameters(step.spec.shape), moments, step.describe().notes


def parts_held(world: World, name: str) -> dict[str, tuple[int, int]]:
    """Return of each distributed parameter the elements in all and those on this rank."""
    step = small(world, name, {})
    parameters = dict(step.layout.model.named_parameters())
    found = {key: (p.numel(), local(p).numel()) for key, p in parameters.items() if isinstance(p, DTensor)}
    step.close()
    return found


def left_behind(world: World, names: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Count threads and tensors after each of three benchmarks that took a step; a first may fill caches.

    Each is made of its definition's defaults, on a smaller model.
    """
    more: dict[str, Params] = {"pp": {"microbatches": 4}, "cp": {"method": "zigzag"}}
    found: dict[str, list[tuple[int, int]]] = {}
    for name in names:
        case = OF_NAME[name].case({"hidden": 32, "sequence": 16, "vocabulary": 64, **more.get(name, {})})
        found[name] = []
        for _ in range(3):
            benchmark = load_target(OF_NAME[name].target)(world, **case.whole)
            benchmark.reset()
            benchmark.step()
            world.barrier()
            benchmark.close()
            del benchmark
            gc.collect()
            tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
            found[name].append((len(list(Path("/proc/self/task").iterdir())), tensors))
    return found


def assert_right_and_as_told(ranks: Ranks, variants: Variants) -> None:
    for name, params in variants:
        for wrong, sent, expected in ranks.call("training_steps:wrong_sent_and_expected", name=name, params=params):
            assert wrong == [0, 0], (name, params)
            told = {axis: value for axis, value in expected.items() if value}
            assert sent == pytest.approx(told, rel=1e-12), (name, params)


def test_every_option_computes_what_one_process_would_and_sends_what_the_closed_form_says(two_ranks: Ranks) -> None:
    variants: Variants = [
        ("ddp", {"bucket_mb": 0.001}),  # a bucket for nearly every parameter
        ("ddp", {"static_graph": True, "checkpointing": "full"}),
        ("ddp", {"no_sync": True, "accumulation": 3}),
        ("zero2", {"prefetch": "explicit", "vocabulary": 61}),
        ("zero3", {"prefetch": "explicit", "accumulation": 2, "no_sync": True, "precision": "bfloat16"}),
        ("hsdp", {"prefetch": "explicit", "accumulation": 2, "checkpointing": "full"}),
        ("ddp", {**COMPRESSED, "accumulation": 3, "vocabulary": 61}),
        ("ddp", {**COMPRESSED, "bucket_mb": 0.001, "precision": "bfloat16"}),
        ("ddp", {**COMPRESSED, "compute": "timed:1ms"}),
        ("zero1", {**DISTRIBUTED, "accumulation": 2, "vocabulary": 61, "kv_heads": 4}),
        ("zero1", {**DISTRIBUTED, "bucket_mb": 0.001, "precision": "bfloat16", "checkpointing": "full"}),
        ("zero1", {**DISTRIBUTED, "compute": "timed:1ms"}),
    ]
    assert_right_and_as_told(two_ranks, variants)


def test_ddp_sums_all_gradients_once_a_synchronisation_in_buckets_as_small_as_asked_for(two_ranks: Ranks) -> None:
    variants: Variants = [
        ("ddp", {}),
        ("ddp", {"accumulation": 3}),
        ("ddp", {"accumulation": 3, "no_sync": True}),
        ("ddp", {"bucket_mb": 0.001}),
    ]
    for found in two_ranks.call("test_parallelisms:calls_of", variants=variants):
        assert {(call.axis, call.op, call.ranks) for calls in found for call in calls} == {("dp", "all_reduce", 2)}
        sums = [sum(call.num_bytes for call in calls) for calls in found]
        assert sums == [rounds * 4 * NUM_SMALL for rounds in (1, 3, 1, 1)]
        assert len(found[0]) == 1
        assert len(found[3]) > 10


def test_gradients_that_lose_more_than_bfloat16_does_are_wrong(two_ranks: Ranks) -> None:
    for found in two_ranks.call("test_parallelisms:wrong_of_narrower_gradients"):
        assert found.pop("bfloat16") == 0
        assert all(found.values()), found


def test_torchs_zero1_sends_the_parameters_once_more_than_ddp_and_says_so(two_ranks: Ranks) -> None:
    """Psi e more than 2 Psi e (n-1)/n a synchronisation, which is Psi e on two ranks."""
    variants = [{"accumulation": 1, "vocabulary": 61}, {"accumulation": 2, "precision": "bfloat16"}]
    for found in two_ranks.call("test_parallelisms:zero1_bytes", variants=variants):
        for (sent, expected, torchs), accumulation in zip(found, (1, 2), strict=True):
            assert sent == torchs == expected, accumulation
    (psi, first, notes), (_, second, _) = two_ranks.call("test_parallelisms:zero1_moments_and_notes", params={})
    assert first + second == psi, "each moment is held by one rank"
    assert abs(first - second) < 0.2 * psi
    assert [note for note in notes if "broadcasts every parameter" in note]


def test_a_distributed_optimizer_sends_each_padded_bucket_twice_and_holds_a_share_of_each_moment(
    two_ranks: Ranks,
) -> None:
    variants: Variants = [("zero1", {**DISTRIBUTED, **more}) for more in ({}, {"accumulation": 3}, {"bucket_mb": 0.01})]
    for found in two_ranks.call("test_parallelisms:calls_of", variants=variants):
        for calls, buckets in zip(found, (1, 1, 11), strict=True):
            counts = Counter((call.axis, call.op, call.ranks) for call in calls)
            assert counts == {("dp", "reduce_scatter", 2): buckets, ("dp", "all_gather", 2): buckets}
            sums = {
                op: sum(call.num_bytes for call in calls if call.op == op) for op in ("reduce_scatter", "all_gather")
            }
            assert set(sums.values()) == {4 * NUM_SMALL}
    for psi, moments, notes in two_ranks.call("test_parallelisms:zero1_moments_and_notes", params=DISTRIBUTED):
        assert moments == psi / 2
        assert len(notes) == 1, "what stays exposed on gloo"


def test_fsdp_gathers_as_often_as_each_name_says(two_ranks: Ranks) -> None:
    """Two layers and the root, whose parameters hsdp keeps; gradients are reduced once where there is no sync."""
    variants: Variants = [*((name, {}) for name in FSDP), ("zero3", {"accumulation": 3, "no_sync": True})]
    for found in two_ranks.call("test_parallelisms:calls_of", variants=variants):
        for (name, _), calls, gathers in zip(variants, found, (3, 6, 5, 18), strict=True):
            axis, counts = "shard" if name == "hsdp" else "dp", Counter((call.axis, call.op) for call in calls)
            assert (counts[axis, "all_gather"], counts[axis, "reduce_scatter"]) == (gathers, 3), name


def test_a_tensor_parallel_layer_holds_half_of_every_matrix_and_sends_four_activations(two_ranks: Ranks) -> None:
    """With the sequence sharded they are gathered and scattered, and gathered once at each end."""
    for whole_ones, sharded in two_ranks.call("test_parallelisms:calls_of", variants=[("tp", {}), ("tp_sp", {})]):
        counts = Counter((call.axis, call.op, call.num_bytes) for call in whole_ones)
        assert counts == {("tp", "all_reduce", ACTIVATION): 8}
        counts = Counter((call.axis, call.op, call.num_bytes) for call in sharded)
        assert counts["tp", "all_gather", ACTIVATION] == 8 + 2
        assert counts["tp", "reduce_scatter", ACTIVATION] == 8
    for name in ("tp", "tp_sp"):
        for held in two_ranks.call("test_parallelisms:parts_held", name=name):
            matrices = [key for key in held if key.startswith("layers.") and "norm" not in key and "weight" in key]
            assert len(matrices) == 2 * 6
            assert all(mine * 2 == all_of_it for all_of_it, mine in (held[key] for key in matrices))


def assert_nothing_left(ranks: Ranks, names: list[str]) -> None:
    for found in ranks.call("test_parallelisms:left_behind", names=names):
        for name, (_, (threads, tensors), (last_threads, last_tensors)) in found.items():
            assert last_threads <= threads, name
            assert last_tensors <= tensors, name


@pytest.mark.full
def test_a_step_that_is_closed_leaves_nothing_behind(two_ranks: Ranks) -> None:
    assert_nothing_left(two_ranks, MAKE_GROUPS)
