"""A plan as a page: candidates and their front, what if, and commands and flags that mean the same step."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_plan_command import typed

from parbench import cli as command_line
from parbench.bench.results.document import Gantt, Points, Stacks
from parbench.workloads.catalogue import DEFINITIONS
from parbench.workloads.costs.strategies import mesh
from parbench.workloads.planner.candidates import Wanted
from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.launchers import commands_of, megatron, small, torchtitan, unmeasured
from parbench.workloads.planner.models import model_of
from parbench.workloads.planner.report.plan_page import dry_run_document, label_of, search_document
from parbench.workloads.planner.report.what_if import what_if
from parbench.workloads.planner.search import search

H100 = PRESETS["h100"]
STEP = replace(model_of("llama3-70b"), checkpointing="selective")
RUN = dry_run(STEP.on({"dp": 2, "pp": 4, "tp": 8}).with_batch(64), H100)
(HYBRID,) = [one for one in DEFINITIONS if one.name == "workload.hybrid"]


def test_what_if_changes_one_thing() -> None:
    told = {name: run for name, run in what_if(RUN) if not isinstance(run, str)}
    as_is = told["as it is"].seconds
    assert as_is == RUN.seconds
    assert told["links inside a node half as fast"].seconds > as_is < told["links across nodes half as fast"].seconds
    assert told["no communication hidden"].exposed_seconds > RUN.exposed_seconds
    assert told["twice the batch"].spec.global_batch == 128
    assert as_is < told["twice the batch"].seconds < 2 * as_is  # the bubble is as long as it was
    assert (told["twice the GPUs"].spec.world, told["twice the GPUs"].spec.global_batch) == (128, 64)
    assert told["twice the GPUs and batch"].spec.global_batch == 128
    assert sum(RUN.parts.values()) == pytest.approx(RUN.seconds)


def test_what_hiding_dispatch_would_bring_is_told_where_there_is_any_that_is_not_hidden() -> None:
    spec = model_of("mixtral-8x7b").on({"fsdp": 64, "ep": 8}).with_batch(64)
    hidden = dict(what_if(dry_run(spec, H100)))["tokens sent beside other microbatches' compute"]
    assert not isinstance(hidden, str)
    [ep] = [axis for axis in hidden.axes if axis.name == "ep"]
    assert ep.exposed_seconds == pytest.approx(ep.seconds / 10)
    assert not any("tokens" in name for of in (hidden, RUN) for name in dict(what_if(of)))


def test_a_link_that_a_run_measured_is_halved_too_and_what_cannot_be_says_why() -> None:
    one = dry_run(STEP.on({"fsdp": 64}).with_batch(64), H100, seconds=lambda call: 1e-3)
    told = dict(what_if(one, lambda call: 1e-3))
    slower = told["all links half as fast"]
    assert not isinstance(slower, str)
    assert slower.axes[0].seconds == pytest.approx(2 * one.axes[0].seconds)
    assert str(told["twice the GPUs"]).startswith("global batch(64) % (dp(1) * fsdp(128)")


def test_the_fastest_and_what_needs_less_memory_are_told_and_drawn() -> None:
    wanted = Wanted(step=model_of("llama3-8b"), gpus=16, global_batch=64)
    found = search(wanted, H100, top=8)
    fastest, front, refused = search_document(found, wanted, 3).parts[0].tables
    assert [row[3] for row in fastest.rows] == [run.seconds for run in found.best[:3]]
    assert [row[-1] for row in front.rows] == [run.fullest.memory.total / 1e9 for run in found.front]
    (points,) = front.figures
    assert isinstance(points, Points)
    assert {*points.front} <= points.points.keys()
    assert len(points.front) == len(found.front)
    assert len(points.points) >= len(found.best)
    stacks = [one for one in fastest.figures if isinstance(one, Stacks)]
    assert [list(one.bars) for one in stacks] == [[label_of(run) for run in found.best[:3]]] * 2
    assert any("too large" in str(row[0]) for row in refused.rows)


def test_the_pipeline_is_drawn_action_by_action() -> None:
    (gantt,) = dry_run_document(RUN).parts[0].tables[0].figures
    assert isinstance(gantt, Gantt)
    facts = gantt.facts
    assert [len(line) for line in facts.predicted or ()] == [2 * RUN.spec.microbatches] * 4
    end = max(line[-1].stop_us for line in facts.predicted or ())
    long = dry_run(RUN.spec.with_batch(1024), H100)
    (gantt,) = dry_run_document(long).parts[0].tables[0].figures
    assert isinstance(gantt, Gantt)
    assert (long.spec.microbatches, gantt.facts.microbatches) == (512, 40)
    assert gantt.told.endswith("Of 512 microbatches 40 are drawn: the others repeat the middle.")
    assert end / 1e6 == pytest.approx(RUN.seconds - RUN.update_seconds - _after(RUN.axes), rel=0.01)


def _after(axes: object) -> float:
    return sum(axis.exposed_seconds for axis in axes if axis.name == "dp")  # type: ignore[attr-defined]


MESHES = [
    ("llama3-8b", {"dp": 8}, {}),
    ("llama3-70b", {"dp": 2, "pp": 4, "fsdp": 2, "tp": 8}, {"schedule": "interleaved", "chunks": 2}),
    ("llama3-70b", {"dp": 2, "pp": 4, "cp": 2, "tp": 4}, {"schedule": "dualpipe_v", "cp_method": "ulysses"}),
    ("mixtral-8x7b", {"dp": 4, "fsdp": 2, "tp": 2, "ep": 4}, {}),
    ("gpt-175b", {"dp": 2, "pp": 8, "tp": 8}, {"schedule": "zb_h1"}),
    ("llama3-405b", {"dp": 2, "pp": 2, "tp": 8}, {}),
]


@pytest.mark.parametrize(("name", "sizes", "more"), MESHES)
def test_commands_are_taken_by_the_measured_step(name: str, sizes: dict[str, int], more: dict[str, object]) -> None:
    spec = replace(model_of(name).on(sizes), **more).with_batch(128)  # type: ignore[arg-type]
    run = dry_run(spec, H100, exact=False)
    (_, here), (_, whole), (_, sweep), _ = commands_of(run)
    for command, ranks in ((here, small(run).world), (whole, spec.world)):
        given = dict(re.findall(r"--set (\w+)=(\S+)", command)) | dict(re.findall(r"--(mesh) (\S+)", command))
        kinds = {param.name: param for param in HYBRID.params}
        assert given.keys() <= kinds.keys()
        params = HYBRID.whole({key: int(text) if kinds[key].kind == "int" else text for key, text in given.items()})
        measured = mesh(params, ranks)
        assert measured.world == ranks
        assert measured.timed_seconds is not None
        if command == whole:
            assert (measured.shape, measured.global_batch) == (spec.shape, spec.global_batch)
    assert f"--nproc {small(run).world} " in here
    assert small(run).world <= 4
    assert "'name = \"workload.hybrid\"'" in sweep


def test_what_the_measured_step_does_otherwise_is_said() -> None:
    assert unmeasured(RUN.spec) == []
    spec = replace(model_of("mixtral-8x7b").on({"dp": 8, "ep": 8}), zero1="reduce_scatter").checkpointed("full:4")
    told = " ".join(unmeasured(spec))
    for words in ("ZeRO 1: it replicates", "full:4: it computes every layer", "experts: their inner size"):
        assert words in told


def test_flags_of_trainers_mean_the_same_mesh() -> None:
    spec = replace(STEP.on({"dp": 2, "pp": 4, "fsdp": 2, "cp": 2, "tp": 8}), schedule="interleaved").with_batch(64)
    titan, other = torchtitan(spec), megatron(spec)
    told = " ".join(titan.flags)
    for flag in (
        "--training.local_batch_size 16 --training.global_batch_size 64",
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2",
        "--parallelism.tensor_parallel_degree 8",
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
        "--parallelism.context_parallel_degree 2 --parallelism.context_parallel_rotate_method alltoall",
        "--activation_checkpoint.mode selective",
    ):
        assert flag in told, flag
    told = " ".join(other.flags)
    for flag in (
        "--num-layers 80 --hidden-size 8192",
        "--group-query-attention --num-query-groups 8",
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--context-parallel-size 2 --cp-comm-type p2p",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "--num-distributed-optimizer-instances 2",
        "--micro-batch-size 1 --global-batch-size 64",
    ):
        assert flag in told, flag
    assert titan.lacks == ("dp outside pp: its pipelines are outermost",)
    assert "--use-tp-pp-dp-mapping" in told
    assert len(other.lacks) == 1  # selective is not the same
    deep = model_of("deepseek-v3").on({"dp": 8, "ep": 8})
    told = " ".join(megatron(deep).flags)
    for flag in (
        "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128",
        "--q-lora-rank 1536",
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq '([0]*3+[1]*58)' --expert-model-parallel-size 8",
    ):
        assert flag in told, flag
    assert "--kv-channels 128 --qk-layernorm" in " ".join(megatron(model_of("qwen3-32b")).flags)
    assert "attention: its heads divide" in " ".join(unmeasured(deep))
    uneven = replace(spec, schedule="zb_h2", split="21+20+20+19")
    assert any("zb_h2" in lack for lack in torchtitan(uneven).lacks)
    assert "--pipeline-model-parallel-layout 'Et*21|t*20|t*20|t*19L'" in megatron(uneven).flags
    assert any("zb_h2" in lack for lack in megatron(uneven).lacks)
    titan, other = (
        torchtitan(replace(spec, every=2, checkpointing="full")),
        megatron(replace(spec, every=2, checkpointing="full")),
    )
    assert titan.flags[-2:] == (
        "--activation_checkpoint.mode selective",
        "--activation_checkpoint.selective_ac_option 2",
    )
    assert other.flags[-1].endswith("--recompute-method block --recompute-num-layers 5")
    plain = megatron(replace(STEP.on({"dp": 64}), zero1="reduce_scatter"))
    assert "--use-distributed-optimizer" in plain.flags


def test_a_page_stands_alone_and_what_does_not_fit_says_so(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    shown = typed("--model", "llama3-70b", "--gpus", "64", "--global-batch", "64", "--tokens", "15T", "-o", str(page))
    assert (shown.exit_code, shown.output) == (0, f"{page}\n")
    html = page.read_text()
    assert len(html) < 500_000
    for word in ("http:", "https:", "@import", "src="):
        assert word not in html
    for words in (
        "Time against memory",
        "What memory holds",
        "What if",
        "torchtitan",
        "parbench slurm submit",
        "tiles",
        "GPU-hours for all tokens",
        "15 T tokens",
    ):
        assert words in html
    told = typed("--model", "llama3-70b", "--mesh", "tp=8", "-o", str(tmp_path / "plan.json"))
    assert told.exit_code == 2
    assert "needs" in told.stderr
    large = typed("--model", "llama3-70b", "--mesh", "tp=8", "-o", str(tmp_path / "plan.md"))
    assert "**TOO LARGE** llama3-70b with tp=8 needs" in (tmp_path / "plan.md").read_text(), large.output
    assert {"time", "what-if", "check", "flags"} <= json.loads((tmp_path / "plan.json").read_text()).keys()
    assert "ends in none of .html, .md or .json" in str(typed("--guide", "-o", "x.txt").output)


def test_the_guide_is_text_first_and_a_page_where_asked(tmp_path: Path) -> None:
    shown = CliRunner().invoke(command_line.main, ["plan", "--guide"])
    assert shown.exit_code == 0, shown.output
    for words in (
        "Assumed: links at 80% of 450 GB/s",
        "llama3-8b: 8.03 B parameters",
        "2 Psi e r",
        "Largest model",
        "Ring and Ulysses",
    ):
        assert words in shown.stdout, words
    page = tmp_path / "guide.html"
    assert typed("--guide", "--model", "mixtral-8x7b", "--gpus", "16", "-o", str(page)).exit_code == 0
    html = page.read_text()
    assert html.count("<figure>") == 6
    assert "http" not in html.replace("http-equiv", "")
    assert json.loads(typed("--guide", "--json").stdout)["table"][0]["strategy"] == "DDP"
    assert "--against goes with --guide" in str(
        typed("--model", "tiny", "--mesh", "dp=2", "--against", str(tmp_path)).output
    )
