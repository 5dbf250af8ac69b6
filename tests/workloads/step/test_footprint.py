"""What a step holds is what the closed forms say, whoever holds it, and what is beside them is named."""

import pytest
from ranks import Ranks
from training_steps import Params, small

from parbench.bench.results.details import COMPONENTS, STATE
from parbench.bench.world.benchmark import Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.step.layout import local, whole
from parbench.workloads.step.probe import run_probes

Asked = dict[str, tuple[str, Params]]

N = 2
SPLIT = {"ddp": (1, 1, 1), "zero1": (1, 1, N), "zero2": (1, N, N), "zero3": (N, N, N)}
"""By how much each of ``STATE`` is divided on two ranks."""
EACH = {"float32": (4, 4, 8), "bfloat16": (2, 2, 12)}
"""Bytes of a parameter in each of ``STATE``: mixed precision keeps masters and moments in float32."""
DEFAULTS: Asked = {
    **{name: (name, {}) for name in (*SPLIT, "hsdp", "tp", "tp_sp", "tp_fsdp")},
    **{f"{name}, bfloat16": (name, {"precision": "bfloat16"}) for name in ("zero1", "tp_fsdp")},
    **{f"{name}, full": (name, {"checkpointing": "full"}) for name in ("ddp", "zero3", "tp")},
    "ddp, selective": ("ddp", {"checkpointing": "selective"}),
    "zero1, distributed": ("zero1", {"optimizer": "distributed"}),
    "ddp, twice the microbatch": ("ddp", {"microbatch": 4}),
}


def looked(world: World, asked: Asked) -> dict[str, tuple[Explanation, int, int, int, int]]:
    """Return the footprint of each step after one, how often a look began, and how many parameters it has: in all,
    divided by placement, and of the root.
    """
    found = {}
    for label, (name, params) in asked.items():
        step = small(world, name, {"kv_heads": 4, **params})
        parameters = list(step.layout.model.parameters())
        sizes = [(whole(parameter).numel(), local(parameter).numel()) for parameter in parameters]
        named = step.layout.model.named_parameters()
        root = sum(whole(p).numel() for name, p in named if not name.startswith("layers."))
        step.reset()
        step.step()
        begun: list[int] = []

        def begin(begun: list[int] = begun) -> None:
            begun.append(1)
            world.barrier()

        memory = run_probes(world, step.probes()[:1], step.step, begin, 0.0)
        assert sum(size for size, _ in sizes) == num_parameters(step.spec.shape)
        divided = sum(size for size, mine in sizes if mine < size)
        found[label] = memory, len(begun), num_parameters(step.spec.shape), divided, root
        step.close()
    return found


class Seen:
    """What both ranks say alike of each step."""

    def __init__(self, ranks: Ranks, asked: Asked) -> None:
        one, other = ranks.call("test_footprint:looked", asked=asked)
        self.of = {label: footprint for label, (footprint, *_) in one.items()}
        self.begun = {begun for _, begun, *_ in (*one.values(), *other.values())}
        self.sizes = {label: (psi, divided, root) for label, (_, _, psi, divided, root) in one.items()}
        assert self.of == {label: footprint for label, (footprint, *_) in other.items()}

    def held(self, label: str, kind: str = "memory") -> dict[str, float]:
        metrics = self.of[label].metrics
        held = {name: metrics[f"{kind}.{name}"].value for name in COMPONENTS if f"{kind}.{name}" in metrics}
        return {name: value for name, value in held.items() if value is not None}

    def activations(self, *labels: str, kind: str = "memory_counted") -> list[float]:
        return [self.held(label, kind)["activations"] for label in labels]

    def assert_state(self, label: str, precision: str) -> None:
        """State is the ZeRO paper's, and tensor parallelism divides what it splits and nothing else."""
        name = label.partition(",")[0]
        psi, divided, _ = self.sizes[label]
        for component, each, parts in zip(STATE, EACH[precision], SPLIT.get(name, (N, N, N)), strict=True):
            expected = each * (psi / parts if name in SPLIT else divided / N + psi - divided)
            assert self.held(label, "memory_formula")[component] == pytest.approx(expected), (label, component)
            for kind in ("memory", "memory_counted"):
                assert self.held(label, kind)[component] == pytest.approx(expected, rel=0.01), (label, component)


@pytest.fixture(scope="module")
def seen(two_ranks: Ranks) -> Seen:
    return Seen(two_ranks, DEFAULTS)


def test_state_is_what_the_zero_paper_says_and_what_tensor_ranks_divide(seen: Seen) -> None:
    for label in (*SPLIT, "zero1, distributed", "tp", "tp_sp", "tp_fsdp"):
        seen.assert_state(label, "float32")
    for label in ("zero1, bfloat16", "tp_fsdp, bfloat16"):
        seen.assert_state(label, "bfloat16")
    assert all(seen.sizes[label][1] > seen.sizes[label][0] / 2 for label in ("tp", "tp_sp"))


@pytest.mark.full
def test_state_is_so_in_bfloat16_of_every_layout(two_ranks: Ranks) -> None:
    asked: Asked = {name: (name, {"precision": "bfloat16"}) for name in (*SPLIT, "tp", "tp_sp")}
    seen = Seen(two_ranks, asked)
    for label in asked:
        seen.assert_state(label, "bfloat16")


def test_only_what_stays_gathered_is_held_beside_its_shard_and_a_note_says_so(seen: Seen) -> None:
    psi, _, root = seen.sizes["hsdp"]
    buffers = {"zero2": 4 * psi / N, "hsdp": 4 * root / N, "ddp": 0, "zero3": 0, "tp": 0, "tp_sp": 0}
    for label, expected in buffers.items():
        assert seen.held(label)["buffers"] == seen.held(label, "memory_counted")["buffers"] == expected, label
    assert seen.held("hsdp")["parameters"] == 4 * (root + (psi - root) / N)
    note = "reshard=false: FSDP2 keeps its shard beside the gathered parameters; it counts as a buffer"
    assert {label: seen.of[label].notes for label in buffers} == {**dict.fromkeys(buffers, ()), "zero2": (note,)}


def test_full_checkpointing_holds_fewer_activations_than_none_and_the_same_state(seen: Seen) -> None:
    for label in ("ddp", "zero3", "tp"):
        for kind in ("memory", "memory_counted", "memory_formula"):
            none, full = seen.held(label, kind), seen.held(f"{label}, full", kind)
            assert full["activations"] < 0.75 * none["activations"], (label, kind)
            assert [full[component] for component in STATE] == [none[component] for component in STATE], (label, kind)


def test_selective_checkpointing_lies_between_and_its_caches_count(seen: Seen) -> None:
    for kind in ("memory", "memory_counted", "memory_formula"):
        held = seen.activations("ddp, full", "ddp, selective", "ddp", kind=kind)
        assert held == sorted({*held}), kind
    assert seen.activations("ddp, selective") == seen.activations("ddp, selective", kind="memory_formula")
    assert seen.of["ddp, selective"].notes == ()


def test_activations_double_with_the_microbatch_and_are_fewer_where_layers_and_the_sequence_are_split(
    seen: Seen,
) -> None:
    labels = ("ddp", "ddp, twice the microbatch")
    one, two = seen.activations(*labels, kind="memory_formula")
    assert two == pytest.approx(2 * one, rel=1e-3)
    for label, formula in zip(labels, (one, two), strict=True):
        assert formula == seen.held(label, "memory_counted")["activations"] <= seen.held(label)["activations"]
    along, split, whole_layers = seen.activations("tp_sp", "tp", "ddp")
    assert along < split < whole_layers
