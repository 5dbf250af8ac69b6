"""What is asked: models by name, meshes as they are written, batches that add up, and the measured steps' own rules."""

from typing import Any

import pytest
from planner_asks import ask

from bench.text import UserError
from workloads.model.shapes import SHAPES, num_parameters
from workloads.planner.ask import parse_mesh, refusal, require
from workloads.planner.models import MODELS, model_of, num_model_parameters


def test_a_model_has_as_many_parameters_as_it_is_named_for() -> None:
    for name, billions in {
        "llama3-8b": 8.03,
        "llama3-70b": 70.55,
        "llama3-405b": 405.85,
        "gpt-7.5b": 7.7,
        "gpt-175b": 175.8,
        "gpt-530b": 531.0,
        "mixtral-8x7b": 46.7,
    }.items():
        assert num_model_parameters(model_of(name)) / 1e9 == pytest.approx(billions, rel=0.005), name
    for name, shape in SHAPES.items():
        assert model_of(name).shape == shape
        assert num_model_parameters(model_of(name)) == num_parameters(shape), name
    assert all(name == model.name for name, model in MODELS.items())


def test_a_mixture_holds_its_experts_beside_what_every_rank_holds() -> None:
    model, gpt = model_of("mixtral-8x7b"), model_of("gpt-175b")
    assert model.expert_parameters == 3 * 4096 * 14336
    dense = num_parameters(model.shape) - 32 * model.expert_parameters
    routers = 32 * 4096 * 8
    assert num_model_parameters(model) == dense + routers + 32 * 8 * model.expert_parameters
    assert gpt.dense_layer_parameters == pytest.approx(12 * 12288**2, rel=1e-3)
    longer = model_of("gpt-175b", 4096)  # which has a position for each token
    assert (longer.shape.sequence, gpt.shape.sequence) == (4096, 2048)
    assert num_model_parameters(longer) - num_model_parameters(gpt) == 2048 * 12288


def test_an_unknown_model_is_refused_with_the_one_that_was_meant() -> None:
    for name, meant in (("llama3-70", "llama3-70b"), ("gpt175b", "gpt-175b"), ("smal", "small")):
        with pytest.raises(UserError, match=rf"model '{name}' is not tiny, .*did you mean '{meant}'\?"):
            model_of(name)
    with pytest.raises(UserError, match=r"sequence\(-1\) < 1"):
        model_of("tiny", -1)


def test_a_mesh_keeps_the_order_in_which_it_is_written_and_what_is_none_is_refused() -> None:
    assert list(parse_mesh("dp=8, fsdp=4,pp=4,tp=8").items()) == [("dp", 8), ("fsdp", 4), ("pp", 4), ("tp", 8)]
    assert list(parse_mesh("tp=2,dp=4")) == ["tp", "dp"]
    assert ask("dp=2,tp=4") != ask("tp=4,dp=2", microbatch=2)
    for text, told in (
        ("", r"axis '' is not dp, fsdp"),
        ("fsd=2", r"axis 'fsd' is not dp, .*did you mean 'fsdp'"),
        ("dp=2,dp=4", r"names dp twice"),
        ("dp=", r"dp has size ''"),
        ("dp=0", r"dp has size '0', and needs a whole number above 0"),
        ("dp=2.5", r"size '2\.5'"),
        ("dp=-2", r"size '-2'"),
        ("dp:2", r"axis 'dp:2'"),
    ):
        with pytest.raises(UserError, match=told):
            parse_mesh(text)
    assert [ask(mesh).mesh_text for mesh in ("dp=2,pp=1,tp=4", "dp=1,tp=1")] == ["dp=2,tp=4", "dp=1"]


def test_the_world_is_the_product_without_what_lies_inside_and_the_batch_what_data_ranks_take() -> None:
    step = ask("dp=2,fsdp=4,tp=8,ep=4", "mixtral-8x7b", microbatch=3, microbatches=5)
    assert step.world == 64
    assert (step.dp, step.fsdp, step.pp, step.cp, step.tp, step.ep) == (2, 4, 1, 1, 8, 4)
    assert step.global_batch == 2 * 4 * 3 * 5
    assert step.tokens == step.global_batch * 8192
    whole, shared = ask("dp=2", microbatch=2), ask("dp=2,cp=4", microbatch=2)
    assert shared.tokens == whole.tokens
    assert shared.local_tokens * 4 == whole.local_tokens == 2 * 128


def test_a_batch_becomes_microbatches_and_comes_back_or_is_refused_with_the_equation() -> None:
    for dp, fsdp, microbatch, m in ((1, 1, 1, 1), (2, 4, 3, 5), (4, 2, 2, 64)):
        step = ask(f"dp={dp},fsdp={fsdp}", microbatch=microbatch).with_batch(dp * fsdp * microbatch * m)
        assert (step.microbatches, step.global_batch) == (m, dp * fsdp * microbatch * m)
    for batch in (0, 3, 9):
        with pytest.raises(UserError, match=rf"global batch\({batch}\) % \(dp\(2\) \* fsdp\(1\) \* microbatch\(2\)\)"):
            ask("dp=2", microbatch=2).with_batch(batch)


def test_a_pipeline_has_the_chunks_of_its_schedule() -> None:
    for mesh, chunks, stages in (("pp=2", 0, 2), ("pp=2", 4, 4), ("dp=2", 0, 1)):
        assert ask(mesh, schedule="interleaved", chunks=chunks, microbatches=4).stages_per_rank == stages


def test_a_step_is_refused_by_the_rule_that_it_breaks() -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("tp=16", {}, r"heads\(8\) % tp\(16\) != 0"),
        ("dp=2", {"microbatch": 0}, r"microbatch\(0\) < 1"),
        ("dp=2", {"microbatches": 0}, r"microbatches\(0\) < 1"),
        ("cp=4,tp=4", {"cp_method": "ulysses"}, r"cp\(4\)"),
        ("dp=2,ep=2", {}, r"ep\(2\) > 1 without experts"),
        ("dp=2", {"checkpointing": "some"}, r"checkpointing 'some' is not none, selective or full"),
        ("pp=2", {"schedule": "1f2b"}, r"schedule\(1f2b\) is not .*did you mean '1f1b'"),
        (
            "pp=2",
            {"schedule": "zb_v", "checkpointing": "full", "microbatches": 4},
            "checkpointing = full is not allowed",
        ),
        ("pp=2", {"schedule": "interleaved", "chunks": 3, "microbatches": 4}, r"layers\(8\) % stages\(6\) != 0"),
    ]
    for mesh, more, told in refused:
        step = ask(mesh, **more)
        with pytest.raises(UserError, match=told) as caught:
            require(step, step.world)
        assert str(caught.value).startswith(f"--mesh {step.mesh_text} cannot carry small-llama: "), mesh
    with pytest.raises(UserError, match=r"--mesh dp\(2\) \* tp\(4\) = 8 != --gpus\(16\)"):
        require(ask("dp=2,tp=4,ep=1"), 16)
    assert refusal(ask("fsdp=3,ep=3", "mixtral-8x7b")) == "experts(8) % ep(3) != 0"
