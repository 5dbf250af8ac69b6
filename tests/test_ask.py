"""What is asked: meshes as they are written, batches that add up, and the measured steps' own rules."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_asks import ask

from bench.errors import UserError
from workloads.hybrid.constraints import refuse
from workloads.planner.ask import parse_mesh, refusal, require


def test_a_mesh_keeps_the_order_in_which_it_is_written() -> None:
    assert list(parse_mesh("dp=8, fsdp=4,pp=4,tp=8").items()) == [("dp", 8), ("fsdp", 4), ("pp", 4), ("tp", 8)]
    assert list(parse_mesh("tp=2,dp=4")) == ["tp", "dp"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"axis '' is not dp, fsdp"),
        ("fsd=2", r"axis 'fsd' is not dp, .*did you mean 'fsdp'"),
        ("dp=2,dp=4", r"names dp twice"),
        ("dp=", r"dp has size ''"),
        ("dp=0", r"dp has size '0', and needs a whole number above 0"),
        ("dp=2.5", r"size '2\.5'"),
        ("dp=-2", r"size '-2'"),
        ("dp:2", r"axis 'dp:2'"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_mesh(text)


def test_the_world_is_the_product_without_what_lies_inside() -> None:
    step = ask("dp=2,fsdp=4,tp=8,ep=4", "mixtral-8x7b")
    assert step.world == 64
    assert (step.dp, step.fsdp, step.pp, step.cp, step.tp, step.ep) == (2, 4, 1, 1, 8, 4)


def test_a_global_batch_is_what_all_data_ranks_take() -> None:
    step = ask("dp=2,fsdp=4,tp=2", microbatch=3, microbatches=5)
    assert step.global_batch == 2 * 4 * 3 * 5
    assert step.tokens == step.global_batch * 128


def test_ranks_of_a_sequence_share_its_tokens_and_add_none() -> None:
    whole, shared = ask("dp=2", microbatch=2), ask("dp=2,cp=4", microbatch=2)
    assert shared.tokens == whole.tokens
    assert shared.local_tokens * 4 == whole.local_tokens


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 64),
)
@settings(deadline=None)
def test_a_batch_that_divides_becomes_microbatches_and_comes_back(dp: int, fsdp: int, microbatch: int, m: int) -> None:
    step = ask(f"dp={dp},fsdp={fsdp}", microbatch=microbatch)
    assert step.with_batch(dp * fsdp * microbatch * m).microbatches == m
    assert step.with_batch(dp * fsdp * microbatch * m).global_batch == dp * fsdp * microbatch * m


@pytest.mark.parametrize("batch", [0, 3, 9])
def test_a_batch_that_does_not_divide_is_refused_with_the_equation(batch: int) -> None:
    with pytest.raises(UserError, match=rf"global batch\({batch}\) % \(dp\(2\) \* fsdp\(1\) \* microbatch\(2\)\)"):
        ask("dp=2", microbatch=2).with_batch(batch)


def test_axes_of_one_rank_are_not_written() -> None:
    assert ask("dp=2,pp=1,tp=4").mesh_text == "dp=2,tp=4"
    assert ask("dp=1,tp=1").mesh_text == "dp=1"


def test_a_pipeline_has_the_chunks_of_its_schedule() -> None:
    assert ask("pp=2", schedule="interleaved", microbatches=4).stages_per_rank == 2
    assert ask("pp=2", schedule="interleaved", chunks=4, microbatches=4).stages_per_rank == 4
    assert ask("dp=2", schedule="interleaved").stages_per_rank == 1


@pytest.mark.parametrize(
    ("mesh", "more", "told"),
    [
        ("tp=16", {}, r"heads\(8\) % tp\(16\) != 0"),
        ("pp=3", {"microbatches": 4}, r"layers\(8\) % stages\(3\) != 0"),
        ("dp=2", {"microbatch": 0}, r"microbatch\(0\) < 1"),
        ("dp=2", {"microbatches": 0}, r"microbatches\(0\) < 1"),
        ("cp=3", {}, r"sequence\(128\)"),
        ("dp=2,ep=2", {}, r"ep\(2\) > 1 without experts"),
        ("dp=2", {"checkpointing": "some"}, r"checkpointing 'some' is not none, selective or full"),
        ("pp=2", {"schedule": "1f2b"}, r"schedule\(1f2b\) is not .*did you mean '1f1b'"),
        ("fsdp=2,pp=2", {"schedule": "zb_v", "microbatches": 4}, r"schedule = zb_v is not allowed with fsdp\(2\)"),
        (
            "pp=2",
            {"schedule": "zb_v", "microbatches": 4, "checkpointing": "full"},
            "checkpointing = full is not allowed with schedule = zb_v",
        ),
    ],
)
def test_a_step_is_refused_by_the_rule_that_it_breaks(mesh: str, more: dict[str, Any], told: str) -> None:
    step = ask(mesh, **more)
    with pytest.raises(UserError, match=told) as caught:
        require(step, step.world)
    assert str(caught.value).startswith(f"--mesh {step.mesh_text} cannot carry small-llama: ")


def test_a_mesh_of_another_size_is_refused_with_the_product() -> None:
    with pytest.raises(UserError, match=r"--mesh dp\(2\) \* tp\(4\) = 8 != --gpus\(16\)"):
        require(ask("dp=2,tp=4,ep=1"), 16)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=5, max_size=5), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None)
def test_the_rules_are_those_of_the_measured_steps(sizes: list[int], microbatch: int, microbatches: int) -> None:
    mesh = dict(zip(("dp", "pp", "fsdp", "cp", "tp"), sizes, strict=True))
    text = ",".join(f"{name}={size}" for name, size in mesh.items())
    step = ask(text, microbatch=microbatch, microbatches=microbatches)
    theirs = refuse(
        step.model.shape,
        mesh,
        microbatches=microbatches,
        microbatch=microbatch,
        world=math.prod(sizes),
        cp_method="zigzag",
    )
    assert refusal(step) == theirs


def test_equal_questions_are_equal() -> None:
    assert ask("dp=2,tp=4", microbatch=2) == ask("dp=2,tp=4", microbatch=2)
    assert ask("dp=2,tp=4") != ask("tp=4,dp=2", microbatch=2)


@pytest.mark.parametrize(
    ("mesh", "model", "more"),
    [
        ("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", {"microbatches": 32}),
        ("dp=4,pp=12,tp=8", "gpt-175b", {"microbatches": 384}),
        ("fsdp=16,cp=8", "llama3-8b", {"cp_method": "ulysses"}),
        ("dp=2,fsdp=64,ep=8", "mixtral-8x7b", {}),
        ("pp=4,tp=2", "small", {"schedule": "zb_v", "microbatches": 8}),
    ],
)
def test_what_clusters_run_is_allowed(mesh: str, model: str, more: dict[str, Any]) -> None:
    step = ask(mesh, model, **more)
    require(step, step.world)


def test_experts_must_divide_over_their_axis_and_the_data_axes() -> None:
    assert refusal(ask("fsdp=3,ep=3", "mixtral-8x7b")) == "experts(8) % ep(3) != 0"
    assert refusal(ask("fsdp=6,ep=4", "mixtral-8x7b")) == "(dp(1) * fsdp(6) * cp(1)) % ep(4) != 0"
