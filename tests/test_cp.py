"""Steps of every method train as one process would, send what the closed form says, and refuse what they cannot do."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_training import SMALL, small, wrong_sent_and_expected, wrong_where_nothing_is_reduced
from torch import Tensor

from bench.errors import UserError
from bench.world import World
from workloads.context.attention_block import Blocks
from workloads.context.attention_kernel import CpuFlash, CudaFlash, Dense, Gradients, Timed
from workloads.context.cp import ContextStep
from workloads.context.ring import RingAttention
from workloads.memory import SavedTensors

METHODS = ["ring", "striped", "zigzag", "allgather_kv", "ulysses", "usp"]
each_method = pytest.mark.parametrize("method", METHODS)

Params = dict[str, Any]


def sent_and_wrong(world: World, variants: list[Params]) -> list[Any]:
    """Return of each variant how much is wrong after two steps, the bytes sent by axis and those of the closed form."""
    return [wrong_sent_and_expected(world, "cp", variant) for variant in variants]


def step_of(world: World, params: Params) -> ContextStep:
    step = small(world, "cp", params)
    assert isinstance(step, ContextStep)
    return step


def gradients_apart(world: World, params: Params) -> float:
    """Return the largest distance of a weight's gradient from one process's, relative to the tensor's largest."""
    step = step_of(world, params)
    step._losses_and_gradients()
    build_alone = step.layout.alone
    alone = step._parity._alone(torch.float32) if build_alone is None else build_alone(torch.float32)
    step._parity._backward(alone, torch.split(step._batch, SMALL["microbatch"]))
    reference = {name: p.grad for name, p in alone.named_parameters()}
    apart = 0.0
    for name, p in step.layout.model.named_parameters():
        expected = reference[name]
        assert p.grad is not None
        assert expected is not None
        apart = max(apart, float((p.grad - expected).abs().max() / expected.abs().max()))
    step.close()
    return apart


def saved_bytes(world: World, params: Params) -> int:
    """Return the bytes of activations that one forward pass keeps for backward."""
    step = step_of(world, params)
    with SavedTensors(step.layout.model) as saved:
        loss = step._forward()
    loss.backward()  # type: ignore[no-untyped-call]
    step.close()
    return saved.num_bytes


class Wrong(CpuFlash):
    """Forgets in backward, or in forward, on one rank."""

    def __init__(self, direction: str) -> None:
        self._direction = direction

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, causal)
        return (out * 1.001, lse) if self._direction == "forward" else (out, lse)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients:
        dq, dk, dv = super().backward(gradient, q, k, v, out, lse, causal)
        return (dq, dk * 1.01, dv) if self._direction == "backward" else (dq, dk, dv)


def seen_by_the_gate(world: World, direction: str) -> int:
    """Return what the gate finds where rank 1's kernel is a little wrong."""
    step = step_of(world, {"method": "zigzag"})
    core = step._core
    assert isinstance(core, RingAttention)
    if world.rank == 1:
        kernel = Wrong(direction)
        core.blocks = Blocks(kernel=kernel, recorder=core.blocks.recorder, tiles=core.blocks.tiles)
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def seen_without_places(world: World, recipe: str) -> int:
    """Return what the gate finds where tokens do not know where they stand."""
    step = step_of(world, {"method": "zigzag", "recipe": recipe})
    model: Any = step.layout.model
    model.places = None
    for layer in model.layers:
        if layer.attention.rotate is not None:
            layer.attention.rotate = layer.attention.rotate.func
    step.reset()
    step.step()
    wrong = step.check()
    step.close()
    return wrong


def error_of(world: World, params: Params) -> str:
    try:
        step_of(world, params)
    except UserError as error:
        return str(error)
    return ""


def axes_and_details(world: World, params: Params) -> tuple[list[str], dict[str, Any], tuple[str, ...]]:
    step = step_of(world, params)
    found = list(step.layout.axes), step.describe().details, step.describe().notes
    step.close()
    return found


def timed_kernel(world: World, params: Params) -> tuple[float, int, bool]:
    """Return the seconds of a pair, what the gate finds after a step, and whether blocks owe other waits nothing."""
    step = step_of(world, params)
    step.reset()
    step.step()
    core, wrong = step._core, step.check()
    assert isinstance(core, RingAttention)
    kernel = core.blocks.kernel
    assert isinstance(kernel, Timed)
    step.close()
    return kernel._seconds_per_pair, wrong, kernel._waiter is not step._waiter


def wrong_where_all_stays_local(world: World, params: Params) -> tuple[int, int]:
    return wrong_where_nothing_is_reduced(world, "cp", params)


def assert_right(found: Any, variant: Params) -> None:
    wrong, sent, expected = found
    assert wrong == [0, 0], variant
    assert sent == {axis: num_bytes for axis, num_bytes in expected.items() if num_bytes}, variant
    assert set(sent) > {"dp"}, variant


# ---- tests


@each_method
def test_two_ranks_train_as_one_process_would(two_ranks: Ranks, method: str) -> None:
    variants: list[Params] = [{"mask": mask} for mask in ("causal", "full", "packed")]
    variants = [{"method": method, "recipe": recipe, **v} for v in variants for recipe in ("gpt", "llama")]
    variants += [
        {"method": method, "precision": "bfloat16", "accumulation": 2},
        {"method": method, "checkpointing": "full"},
    ]
    if method in ("ring", "ulysses"):
        variants.append({"method": method, "checkpointing": "selective", "recipe": "llama"})
    for found in two_ranks.call("test_cp:sent_and_wrong", variants=variants):
        for each, variant in zip(found, variants, strict=True):
            assert_right(each, variant)


@each_method
def test_four_ranks_train_as_one_process_would(four_ranks: Ranks, method: str) -> None:
    """Three heads a rank, three tokens a rank or a chunk, or keys of one head."""
    odd: Params = {"hidden": 48, "ffn": 44, "vocabulary": 61, "heads": 12, "sequence": 24, "kv_heads": 4}
    variants: list[Params] = [{"method": method, "mask": "packed", "recipe": "llama", **odd}]
    if method in ("ring", "usp"):
        more: Params = {"mask": "full", "precision": "bfloat16", "accumulation": 2, **odd, "kv_heads": 12}
        variants.append({"method": method, **more})
    for found in four_ranks.call("test_cp:sent_and_wrong", variants=variants):
        for each, variant in zip(found, variants, strict=True):
            assert_right(each, variant)


@each_method
def test_gradients_of_all_weights_are_one_processs_in_float32(two_ranks: Ranks, method: str) -> None:
    for mask in ("causal", "packed"):
        for apart in two_ranks.call("test_cp:gradients_apart", params={"method": method, "mask": mask}):
            assert apart <= 1e-5


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_gate_sees_one_ranks_wrong_kernel(two_ranks: Ranks, direction: str) -> None:
    assert min(two_ranks.call("test_cp:seen_by_the_gate", direction=direction)) > 0


@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_the_gate_sees_tokens_at_wrong_places(two_ranks: Ranks, recipe: str) -> None:
    assert min(two_ranks.call("test_cp:seen_without_places", recipe=recipe)) > 0


@each_method
def test_what_is_kept_for_backward_falls_with_the_ranks(two_ranks: Ranks, four_ranks: Ranks, method: str) -> None:
    """In equal parts, but for a few bytes: the mean loss, and how many tokens it is of."""
    size: Params = {"hidden": 64, "sequence": 64, "kv_heads": 4, "method": method}
    [two, _], [four, *_] = (ranks.call("test_cp:saved_bytes", params=size) for ranks in (two_ranks, four_ranks))
    assert two / four == pytest.approx(2, rel=2e-3)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"method": "zigzag", "sequence": 18}, "sequence(18) % (2 * cp(2)) != 0: zigzag gives each rank two chunks"),
        ({"method": "ulysses", "heads": 1, "kv_heads": 1}, "heads(1) % ulysses(2) != 0"),
        ({"method": "torch_cp"}, "method = torch_cp is not allowed on gloo and cpu"),
        ({"attention": "timed:5ms"}, "attention = timed:5ms is not allowed with compute = real"),
    ],
)
def test_the_target_refuses_in_the_same_words(two_ranks: Ranks, params: Params, told: str) -> None:
    for error in two_ranks.call("test_cp:error_of", params=params):
        assert error.startswith(told)


@pytest.mark.parametrize(("method", "axes"), [("ring", ["cp", "dp"]), ("usp", ["ulysses", "ring", "dp"])])
def test_the_row_says_how_sequences_lie_and_what_is_sent(four_ranks: Ranks, method: str, axes: list[str]) -> None:
    found, details, notes = four_ranks.call("test_cp:axes_and_details", params={"method": method})[0]
    assert found == axes
    assert details["tokens_per_rank"] == 4
    assert set(details["attention_bytes"]["forward"]) == set(axes[:-1])
    assert details["crossover_ranks"] == 3  # twice as many heads as keys have
    assert details["balance_limit"] == (4 / 7 if method == "ring" else 1)
    assert details["documents"] is None
    assert details["kernel"] == "flash_cpu"
    assert notes == ()


def described_on(world: World, kernel: str, params: Params) -> tuple[object, list[str]]:
    """Return the kernel that a row tells of and its notes on it, where the device has that kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workloads.context.cp.kernel_for", lambda *_: {"dense": Dense(), "flash": CudaFlash()}[kernel])
        step = step_of(world, params)
    found = step.describe()
    step.close()
    return found.details["kernel"], [note for note in found.notes if note.startswith("attention: ")]


@pytest.mark.parametrize(
    ("kernel", "params", "told", "noted"),
    [
        ("dense", {}, "dense", "in float32 with heads of 8"),
        ("dense", {"precision": "bfloat16"}, "dense", "in bfloat16 with heads of 8"),
        ("flash", {"precision": "bfloat16"}, "flash_cuda", None),
        ("dense", {"compute": "timed:1ms", "attention": "timed:2ms"}, "timed", None),
    ],
)
def test_a_row_names_its_kernel_and_owns_up_to_the_plain_formula(
    two_ranks: Ranks, kernel: str, params: Params, told: str, noted: str | None
) -> None:
    given: Params = {"method": "ring", **params}
    for name, notes in two_ranks.call("test_cp:described_on", kernel=kernel, params=given):
        assert name == told
        assert len(notes) == (noted is not None)
        assert all(note.startswith("attention: the plain formula in float32") and noted in note for note in notes)


def test_packed_rows_say_their_documents_and_timed_ones_what_their_time_is(two_ranks: Ranks) -> None:
    packed: Params = {"method": "zigzag", "mask": "packed", "compute": "timed:1ms", "attention": "timed:2ms"}
    _, details, notes = two_ranks.call("test_cp:axes_and_details", params=packed)[0]
    assert sum(details["documents"]) == SMALL["sequence"]
    assert details["balance_limit"] is None
    assert any(note.startswith("attention timed:2ms: ") for note in notes)


def test_timed_attention_takes_its_time_on_the_mean_rank(two_ranks: Ranks) -> None:
    timed: Params = {"method": "ring", "compute": "timed:1ms", "attention": "timed:2ms"}
    for seconds, wrong, apart in two_ranks.call("test_cp:timed_kernel", params=timed):
        pairs = 2 * 4 * 16 * 17 / 2
        assert seconds * pairs / 2 == pytest.approx(2e-3)
        assert wrong == 0
        assert apart


@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_timed_gradients_that_are_never_averaged_are_seen(two_ranks: Ranks, method: str) -> None:
    timed: Params = {"method": method, "compute": "timed:1ms", "attention": "timed:2ms"}
    found = two_ranks.call("test_cp:wrong_where_all_stays_local", params=timed)
    assert max(late for late, _ in found) > 0
    assert max(early for _, early in found) > 0
