"""What a step holds is what the closed forms say, whoever holds it, and what is beside them is named."""

from typing import Any, cast

import pytest
from ranks import Ranks

from bench.runner import load_target
from bench.world import World
from workloads.definitions import DEFINITIONS
from workloads.footprint import COMPONENTS, Batch, Footprint, footprint
from workloads.fsdp import root_parameters
from workloads.layout import local, whole
from workloads.model import Transformer
from workloads.shapes import num_parameters, shape_of
from workloads.training import TrainingStep

Held = dict[str, float]

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "sequence": 16, "vocabulary": 64, "microbatch": 2}
OF_NAME = {definition.name.removeprefix("workload."): definition for definition in DEFINITIONS}
STATE = ("parameters", "gradients", "optimizer")
N = 2
SPLIT = {
    "ddp": (1, 1, 1),
    "zero1": (1, 1, N),
    "zero2": (1, N, N),
    "zero3": (N, N, N),
}
"""By how much each of ``STATE`` is divided on two ranks."""
EACH = {"float32": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes of a parameter in each of ``STATE``: mixed precision keeps masters and moments in float32."""
TOTALS = {
    ("ddp", "float32"): 16.0,
    ("zero1", "float32"): 8 + 8 / N,
    ("zero2", "float32"): 4 + 12 / N,
    ("zero3", "float32"): 16 / N,
    ("ddp", "bfloat16"): 16.0,
    ("zero1", "bfloat16"): 4 + 12 / N,
    ("zero2", "bfloat16"): 2 + 14 / N,
    ("zero3", "bfloat16"): 16 / N,
}


def made(world: World, name: str, params: dict[str, Any]) -> TrainingStep:
    definition = OF_NAME[name]
    defaults = {param.name: param.default for param in definition.params if not param.optional}
    step = load_target(definition.target)(world, **{**defaults, **SMALL, **params})
    assert isinstance(step, TrainingStep)
    return step


def looked(world: World, name: str, params: dict[str, Any]) -> tuple[Footprint, int]:
    """Return the footprint of a step that has been taken once, and how often each look began."""
    step = made(world, name, params)
    step.reset()
    step.step()
    begun: list[int] = []

    def begin() -> None:
        begun.append(1)
        step.reset()
        world.barrier()

    options = step._options
    batch = Batch(
        microbatch=options.microbatch, element_bytes=options.dtype.itemsize, checkpointing=options.checkpointing
    )
    found = footprint(world, step.layout, options.shape, batch, step._forward, begin)
    step.close()
    return found, len(begun)


def divided_and_not(world: World, name: str) -> tuple[int, int]:
    """Return the parameters that a tensor axis divides, and those that it does not, as they are placed."""
    step = made(world, name, {})
    counts = [0, 0]
    for parameter in step.layout.model.parameters():
        size = whole(parameter).numel()
        counts[0 if local(parameter).numel() < size else 1] += size
    step.close()
    return counts[0], counts[1]


def root_size(world: World) -> tuple[int, int]:
    """Return the elements of the root's parameters, and of all."""
    step = made(world, "hsdp", {})
    parameters = root_parameters(cast(Transformer, step.layout.model))
    root = sum([whole(parameter).numel() for parameter in parameters])
    step.close()
    return root, num_parameters(step._options.shape)


def values(found: Footprint, kind: str = "memory") -> Held:
    held = {name: found.metrics[f"{kind}.{name}"].value for name in COMPONENTS if f"{kind}.{name}" in found.metrics}
    return {name: value for name, value in held.items() if value is not None}


def seen(ranks: Ranks, name: str, **params: Any) -> Footprint:
    (found, _), (other, _) = ranks.call("test_footprint:looked", name=name, params=params)
    assert isinstance(found, Footprint)
    assert found == other
    return found


def psi() -> int:
    return num_parameters(shape_of({"shape": "tiny", **SMALL}))


@pytest.mark.parametrize("precision", EACH)
@pytest.mark.parametrize("name", SPLIT)
def test_state_is_what_the_zero_paper_says(two_ranks: Ranks, name: str, precision: str) -> None:
    found = seen(two_ranks, name, precision=precision)
    measured, counted, formula = (values(found, kind) for kind in ("memory", "memory_counted", "memory_formula"))
    for component, each, parts in zip(STATE, EACH[precision], SPLIT[name], strict=True):
        assert formula[component] == each * psi() / parts, component
        assert measured[component] == pytest.approx(formula[component], rel=0.01), component
        assert counted[component] == pytest.approx(formula[component], rel=0.01), component
    assert sum(measured[component] for component in STATE) == pytest.approx(TOTALS[name, precision] * psi(), rel=0.01)


@pytest.mark.parametrize("name", ["ddp", "zero3", "tp"])
def test_a_ranks_own_state_is_in_the_details_and_the_largest_counts(two_ranks: Ranks, name: str) -> None:
    found = seen(two_ranks, name)
    by_rank = found.details["memory_by_rank"]
    assert list(by_rank) == list(COMPONENTS)
    for component, held in values(found).items():
        assert len(by_rank[component]) == 2
        assert max(by_rank[component]) == held


@pytest.mark.parametrize("precision", EACH)
@pytest.mark.parametrize("name", ["tp", "tp_sp", "tp_fsdp"])
def test_tensor_parallelism_divides_what_it_splits_and_nothing_else(
    two_ranks: Ranks, name: str, precision: str
) -> None:
    [(divided, not_divided), _] = two_ranks.call("test_footprint:divided_and_not", name=name)
    assert divided + not_divided == psi()
    assert divided > psi() / 2
    held = divided / N + not_divided
    found = seen(two_ranks, name, precision=precision)
    for component, each in zip(STATE, EACH[precision], strict=True):
        assert values(found)[component] == pytest.approx(each * held, rel=0.01), component
        assert values(found, "memory_formula")[component] == pytest.approx(each * held), component


def test_zero2_keeps_its_shard_beside_the_gathered_parameters_and_says_so(two_ranks: Ranks) -> None:
    found = seen(two_ranks, "zero2")
    assert values(found)["buffers"] == values(found, "memory_counted")["buffers"] == 4 * psi() / N
    assert found.notes == ("zero2: FSDP2 keeps its shard beside the gathered parameters; it counts as a buffer",)


@pytest.mark.parametrize("name", ["ddp", "zero3", "tp", "tp_sp"])
def test_nothing_is_beside_what_is_not_gathered(two_ranks: Ranks, name: str) -> None:
    found = seen(two_ranks, name)
    assert values(found)["buffers"] == values(found, "memory_counted")["buffers"] == 0
    assert found.notes == ()


def test_hsdp_holds_its_root_gathered_and_only_the_roots_shard_beside_it(two_ranks: Ranks) -> None:
    [(root, everything), _] = two_ranks.call("test_footprint:root_size")
    held = values(seen(two_ranks, "hsdp"))
    assert held["parameters"] == 4 * (root + (everything - root) / N)
    assert held["buffers"] == 4 * root / N


@pytest.mark.parametrize("name", ["ddp", "zero3", "tp"])
@pytest.mark.parametrize("kind", ["memory", "memory_counted", "memory_formula"])
def test_full_checkpointing_holds_fewer_activations_than_none(two_ranks: Ranks, name: str, kind: str) -> None:
    none, full = (values(seen(two_ranks, name, checkpointing=how), kind) for how in ("none", "full"))
    assert full["activations"] < 0.75 * none["activations"]
    for component in STATE:
        assert full[component] == none[component]


def test_selective_checkpointing_lies_between_and_has_the_formula_of_none_by_a_note(two_ranks: Ranks) -> None:
    none, selective, full = (seen(two_ranks, "ddp", checkpointing=how) for how in ("none", "selective", "full"))
    held = [values(found)["activations"] for found in (full, selective, none)]
    assert held == sorted({*held})
    assert values(selective, "memory_formula") == values(none, "memory_formula")
    assert selective.notes == (
        "selective checkpointing: the formula of activations is that of none; torch keeps them uncounted",
    )


def test_what_selective_checkpointing_keeps_is_measured_and_not_counted(two_ranks: Ranks) -> None:
    """Results of matrix products are kept for backward by the checkpoint's own cache, which no hook sees."""
    selective, full = (seen(two_ranks, "ddp", checkpointing=how) for how in ("selective", "full"))
    assert "activations" not in values(selective, "memory_counted")
    assert values(selective, "memory")["activations"] > values(full, "memory")["activations"]


def test_the_formula_of_activations_is_of_the_layers_alone_and_doubles_with_the_microbatch(two_ranks: Ranks) -> None:
    small, large = (seen(two_ranks, "ddp", microbatch=microbatch) for microbatch in (2, 4))
    one, two = (values(found, "memory_formula")["activations"] for found in (small, large))
    assert two == 2 * one
    for found, formula in ((small, one), (large, two)):
        # embeddings, last norm, head and loss come on top
        assert formula < values(found, "memory_counted")["activations"] <= values(found)["activations"]


def test_splitting_layers_saves_activations_and_the_sequence_saves_more(two_ranks: Ranks) -> None:
    whole_layers, split, along = (
        values(seen(two_ranks, name), "memory_counted")["activations"] for name in ("ddp", "tp", "tp_sp")
    )
    assert along < split < whole_layers


def test_every_look_begins_at_the_line_and_every_metric_says_how_it_was_found(two_ranks: Ranks) -> None:
    for found, begun in two_ranks.call("test_footprint:looked", name="ddp", params={}):
        assert begun == 2
        assert set(found.metrics) == {
            *(f"{kind}.{name}" for kind in ("memory", "memory_counted") for name in COMPONENTS),
            *(f"memory_formula.{name}" for name in (*STATE, "activations")),
        }
        for name, metric in found.metrics.items():
            kind = name.partition(".")[0]
            told = {"memory": "measured: ", "memory_counted": "counted from", "memory_formula": "closed form"}[kind]
            assert metric.method.startswith(told)
            assert (metric.unit, metric.better) == ("B", "lower")
