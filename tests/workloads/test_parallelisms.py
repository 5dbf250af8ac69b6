"""Each parallelism sends, gathers, holds and gives back what its name says, however its options are set."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training_steps import OF_NAME, Params, sent_and_expected, small

from parbench.bench.rank.runner import load_target
from parbench.bench.world.torch_compat import group_named
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.data_parallel.fsdp import shard, what_stays_exposed
from parbench.workloads.step.layout import Layout, local, make_mesh, whole
from parbench.workloads.step.sent_bytes import Counted, SentCall, counted
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


HOOKS: dict[str, Callable[[Tensor, World], Tensor]] = {
    "averaged": lambda buffer, world: buffer / world.size,
    "summed": lambda buffer, world: buffer,
    "travels in bfloat16": lambda buffer, world: (buffer / world.size).bfloat16().float(),
    "of rank 0 twice": lambda buffer, world: buffer * (1 - world.rank),
}


def wrong_of_hooks(world: World) -> dict[str, int]:
    """Return how much is wrong in a check alone where DDP sums what each hook makes of each bucket."""
    found = {}
    for name, change in HOOKS.items():
        step = stepped(small(world, "ddp", {}))

        def summed(_: object, bucket: GradBucket, change: Any = change) -> torch.futures.Future[Tensor]:
            changed = change(bucket.buffer(), world)
            dist.all_reduce(changed, group=world.group)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(changed)
            return done

        cast(DistributedDataParallel, step.layout.module).register_comm_hook(None, summed)
        found[name] = step.check()
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


def wrong_without_sync(world: World) -> dict[str, int]:
    """Return how much is wrong in a check alone whose gradients, or one parameter's, stay on their ranks."""
    found = {}
    for precision in ("float32", "bfloat16"):
        step = stepped(small(world, "ddp", {"precision": precision, "accumulation": 2}))
        with cast(DistributedDataParallel, step.layout.module).no_sync():
            found[f"ddp {precision}"] = step.check()
    step = stepped(small(world, "zero1", DISTRIBUTED))
    object.__setattr__(step.layout, "gather_gradients", lambda: None)
    found["gradients that were not scattered"] = step.check()
    for name in FSDP:
        step = stepped(small(world, name, {}))
        cast(FSDPModule, step.layout.model).set_requires_gradient_sync(False)
        found[name] = step.check()
        step.close()
    step = small(world, "ddp", {})
    module = cast(DistributedDataParallel, step.layout.module)
    module._set_params_and_buffers_to_ignore_for_model(step.layout.model, ["head.weight"])  # type: ignore[no-untyped-call]
    alone = DistributedDataParallel(step.layout.model, process_group=world.group)
    object.__setattr__(step.layout, "module", alone)
    step.reset()
    found["a parameter left out"] = step.check()
    return found


def gathers_before_each_layer(world: World, case: str, prefetch: str) -> list[int]:
    """Return how many gathers have been issued when the embedding and each layer of a forward pass begin to compute."""
    step = small(world, case, {"prefetch": prefetch, "layers": 3})
    step.step()
    issued: list[int] = []
    with Counted(step.layout.axes) as mode:

        def note(module: nn.Module, args: object) -> None:
            issued.append(len([call for call in mode.calls if call.op == "all_gather"]))

        for name in ("tokens", *(f"layers.{number}.attention_norm" for number in range(3))):
            step.layout.model.get_submodule(name).register_forward_pre_hook(note)
        step._forward()
    step.close()
    return issued


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


def meshes(world: World) -> tuple[list[float], list[float], list[int], bool]:
    """Return a distributed tensor whole and in part, the sizes of a mesh's axes, and whether the world was made."""
    mesh, _ = make_mesh(world, dp=world.size)
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    mesh, made = make_mesh(world, outer=1, inner=world.size)
    sizes = [mesh.get_group(name).size() for name in ("outer", "inner")]
    return whole(tensor).tolist(), local(tensor).tolist(), sizes, distributed_c10d._get_default_group() in made


def groups_around_close(world: World, has_axes: bool) -> tuple[int, int, float]:
    """Return how many groups more there are during and after a layout, one of whose two axes is the world; a sum."""
    before = len(distributed_c10d._world.pg_map)
    mesh, made = make_mesh(world, outer=1, inner=world.size) if has_axes else (None, ())
    model = nn.Linear(2, 2)
    layout = Layout(
        module=model,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        axes={"inner": world.group if mesh is None else mesh.get_group("inner")},
        data_rank=0,
        data_size=1,
        made_groups=made,
    )
    while_open = len(distributed_c10d._world.pg_map)
    names = [group.group_name for group in made]
    layout.close()
    for name in names:
        with pytest.raises(RuntimeError):
            group_named(name)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=world.group)
    return while_open - before, len(distributed_c10d._world.pg_map) - before, float(total)


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


@pytest.mark.full
def test_so_does_every_pair_of_options(two_ranks: Ranks) -> None:
    accumulating = [{"precision": precision, "accumulation": 2} for precision in ("float32", "bfloat16")]
    variants: Variants = [
        *(("ddp", {**given, "no_sync": no_sync}) for given in accumulating for no_sync in (True, False)),
        *(("ddp", {"static_graph": True, **given}) for given in ({}, {"precision": "bfloat16"})),
        *(
            (name, {**given, "prefetch": prefetch, **({} if name == "hsdp" else {"no_sync": True})})
            for name in FSDP
            for given in accumulating
            for prefetch in ("default", "explicit")
        ),
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


@pytest.mark.full
def test_wrong_sums_are_caught_and_only_they(two_ranks: Ranks) -> None:
    one, other = two_ranks.call("test_parallelisms:wrong_of_hooks")
    assert (one.pop("averaged"), other.pop("averaged")) == (0, 0)
    assert all(one[hook] or other[hook] for hook in one), (one, other)
    one, other = two_ranks.call("test_parallelisms:wrong_without_sync")
    assert all(one[case] or other[case] for case in one), (one, other)


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


@pytest.mark.full
def test_torchs_zero1_sends_a_broadcast_more_on_four_ranks_too(four_ranks: Ranks) -> None:
    for [(sent, expected, torchs)] in four_ranks.call("test_parallelisms:zero1_bytes", variants=[{"accumulation": 1}]):
        assert sent == torchs == expected


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


@pytest.mark.full
def test_explicit_prefetch_gathers_one_layer_ahead_of_the_roots_and_a_layers_own(two_ranks: Ranks) -> None:
    for name in FSDP:
        for prefetch, gathers in (("default", [1, 2, 3, 4]), ("explicit", [2, 3, 4, 4])):
            found = two_ranks.call("test_parallelisms:gathers_before_each_layer", case=name, prefetch=prefetch)
            assert found == [gathers] * 2, (name, prefetch)


@pytest.mark.parametrize(("device", "asynchronous"), [("cpu", [True]), ("cuda", [])])
def test_explicit_prefetch_leaves_a_gpu_fsdps_own_streams(
    monkeypatch: pytest.MonkeyPatch, device: str, asynchronous: list[bool]
) -> None:
    found: list[bool] = []
    prefetched: list[object] = []
    wrapped: Any = SimpleNamespace(
        _set_unshard_async_op=lambda async_op: found.append(async_op),
        set_modules_to_forward_prefetch=prefetched.append,
        set_modules_to_backward_prefetch=prefetched.append,
    )
    monkeypatch.setattr("parbench.workloads.data_parallel.fsdp.fully_shard", lambda *_, **__: wrapped)
    model: Any = SimpleNamespace(layers=[nn.Linear(1, 1) for _ in range(3)])
    mesh: Any = SimpleNamespace(device_type=device)
    shard(model, mesh, lambda part, name: None, reshard=True, prefetch="explicit")
    assert (found, len(prefetched)) == (asynchronous, 6)


def test_a_row_names_what_stays_exposed_on_gloo_and_says_nothing_elsewhere() -> None:
    gloo, nccl = (cast(World, SimpleNamespace(backend=backend)) for backend in ("gloo", "nccl"))
    (default,), (explicit,) = (what_stays_exposed(gloo, prefetch) for prefetch in ("default", "explicit"))
    assert "reduce_scatter blocks" in default
    assert "prefetches no all_gather" in default
    assert "the first all_gather" in explicit
    assert what_stays_exposed(nccl, "default") == ()


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


def test_a_mesh_has_tensors_whole_and_in_part_and_does_not_make_the_world(two_ranks: Ranks) -> None:
    expected = [([0, 1, 2, 3], part, [1, 2], False) for part in ([0, 1], [2, 3])]
    assert two_ranks.call("test_parallelisms:meshes") == expected
    tensor = torch.ones(2)
    assert whole(tensor) is local(tensor) is tensor


def test_a_closed_layout_gives_back_the_groups_that_were_made_for_it_alone(two_ranks: Ranks) -> None:
    assert two_ranks.call("test_parallelisms:groups_around_close", has_axes=True) == [(1, 0, 2)] * 2
    assert two_ranks.call("test_parallelisms:groups_around_close", has_axes=False) == [(0, 0, 2)] * 2


def assert_nothing_left(ranks: Ranks, names: list[str]) -> None:
    for found in ranks.call("test_parallelisms:left_behind", names=names):
        for name, (_, (threads, tensors), (last_threads, last_tensors)) in found.items():
            assert last_threads <= threads, name
            assert last_tensors <= tensors, name


@pytest.mark.full
def test_a_step_that_is_closed_leaves_nothing_behind(two_ranks: Ranks) -> None:
    assert_nothing_left(two_ranks, MAKE_GROUPS)


@pytest.mark.full
def test_nor_does_one_that_makes_no_groups(two_ranks: Ranks) -> None:
    assert_nothing_left(two_ranks, [name for name in OF_NAME if name not in MAKE_GROUPS])
