"""``parbench plan``: what is asked becomes a step, a search or a check, and bad input one sentence and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parbench import cli as command_line
from parbench.bench.plan.cases import make_case
from parbench.bench.text import UserError
from parbench.workloads.planner.hardware import PRESETS
from parbench.workloads.planner.plan_command import Given, answer, machine_of, spec_of
from tests.support.paths import ROOT, Command
from tests.support.reports_fixtures import (
    ENVIRONMENT,
    counted_metric,
    curve_records,
    make_plan,
    make_run,
    ok_record,
    seconds_metric,
    write_run,
)


def given(**more: Any) -> Given:
    return Given(**{"model": "llama3-8b", **more})


def told(**more: Any) -> Any:
    return json.loads(answer(given(as_json=True, **more)).text)


def typed(*words: str) -> Result:
    return CliRunner().invoke(command_line.main, ["plan", *words])


def test_what_does_not_fit_is_shown_and_exits_with_2(parbench: Command) -> None:
    shown = parbench("plan", "--model", "llama3-70b", "--mesh", "tp=8", "--json")
    assert shown.returncode == 2
    assert json.loads(shown.stdout)["fits"] is False
    assert shown.stderr.startswith("parbench: llama3-70b with tp=8 needs ")
    assert shown.stderr.count("\n") == 1


def test_command_answers_on_stdout() -> None:
    for line, part in (
        ("--model llama3-70b --mesh dp=8,fsdp=4,pp=4,tp=8", "llama3-70b on 1024 GPUs (h100)"),
        ("--model tiny --mesh dp=2 --json", '"model":"tiny"'),
        ("--model llama3-8b --mesh fsdp=8 --explain", "arXiv 1910.02054"),
        (
            "--model llama3-8b --gpus 4 --top 2 --schedule 1f1b --microbatch 1",
            "at global batch 4 of 8192 tokens",
        ),
    ):
        shown = typed(*line.split())
        assert (shown.exit_code, shown.stderr) == (0, ""), shown.output
        assert part in shown.stdout, line


BAD: list[tuple[str, str]] = [
    ("", "--gpus is missing"),
    ("--mesh dp=2 --model llama3-7b", "model 'llama3-7b' is not tiny, "),
    ("--mesh tp=8 --model llama3-70", "did you mean 'llama3-70b'?"),
    ("--gpus 8 --microbatches 4", "--microbatches needs --mesh: a search"),
    (
        "--gpus 8 --checkpointing ful",
        "checkpointing 'ful' is not none, selective, full or full:K; did you mean 'full'?",
    ),
    (
        "--gpus 8 --model llama3-70b --schedule 1f1b --microbatch 1",
        "smallest feasible: 16 GPUs as pp=2,tp=8",
    ),
    ("--mesh dp=2 --microbatches 2 --global-batch 4", "say the same thing"),
    ("--mesh dp=2 --precision bf16", "--precision 'bf16' is not float32 or bfloat16"),
    ("--mesh dp=2 --schedule 1f2b", "; did you mean '1f1b'?"),
    (
        "--mesh fsd=2",
        "mesh axis 'fsd' is not dp, fsdp, pp, cp, tp, ep or etp; did you mean 'fsdp'?",
    ),
    ("--mesh pp=2 --split 20+13", "split = '20+13' holds 33 layers, and the model has layers(32)"),
    ("--gpus 8 --split 16+16", "--split needs --mesh: a search"),
    ("--mesh dp=2 --microbatch 0 --global-batch 4", "--microbatch(0) < 1"),
    ("--mesh dp=2,tp=4 --gpus 9", "dp(2) * tp(4) = 8 != --gpus(9)"),
    ("--mesh dp=2 --hardware tpu", "hardware 'tpu' is not a100"),
    ("--mesh tp=16 --gpus 16", "--mesh tp=16 cannot carry llama3-8b: kv_heads(8) % tp(16) != 0"),
    ("--validate absent", "no such folder: absent"),
    ("--validate absent -o plan.md", "-o does not go with --validate"),
]


def test_bad_input_is_one_sentence_and_exits_with_2() -> None:
    for words, sentence in BAD:
        refused = typed("--model", "llama3-8b", *words.split())
        assert (refused.exit_code, refused.stdout) == (2, ""), (words, refused.output)
        assert refused.stderr.startswith("parbench: "), words
        assert refused.stderr.count("\n") == 1, words
        assert sentence in refused.stderr, (words, refused.stderr)
    for line in ("", "--mesh dp=2", "--gpus 8"):
        assert "--model is missing" in typed(*line.split()).stderr


def test_nothing_heavy_is_imported() -> None:
    files = sorted((ROOT / "workloads" / "planner").glob("**/*.py"))
    modules = [
        ".".join(("parbench", *path.relative_to(ROOT).with_suffix("").parts)) for path in files
    ]
    imports = ", ".join(modules)
    heavy = "print([name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    script = f"import sys, parbench.workloads.commands, {imports}\n{heavy}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert "parbench.workloads.planner.measured.validate" in modules


def test_gpus_are_the_meshs_and_microbatches_come_from_the_batch_or_fill_the_pipeline() -> None:
    assert spec_of(given(mesh="dp=2,tp=4")).world == 8
    for more, microbatches in (
        ({"mesh": "dp=2"}, 1),
        ({"mesh": "pp=4"}, 16),
        ({"mesh": "pp=4", "microbatches": 5}, 5),
        ({"mesh": "dp=2,pp=4", "global_batch": 64, "microbatch": 2}, 16),
    ):
        assert spec_of(given(**more)).microbatches == microbatches, more


def test_options_reach_the_step_and_the_machine() -> None:
    sizes: dict[str, Any] = {
        "sequence": 16384,
        "precision": "float32",
        "chunks": 4,
        "microbatches": 4,
    }
    kinds: dict[str, Any] = {
        "schedule": "interleaved",
        "checkpointing": "full",
        "cp_method": "ulysses",
    }
    ask = spec_of(given(mesh="pp=2,cp=2", **sizes, **kinds))
    assert (ask.shape.sequence, ask.element_bytes, ask.schedule, ask.chunks) == (
        16384,
        4,
        "interleaved",
        4,
    )
    assert (ask.checkpointing, ask.cp_method) == ("full", "ulysses")
    assert [machine_of(given(hardware=name))[0] for name in (None, "b200")] == [
        PRESETS["h100"],
        PRESETS["b200"],
    ]


def test_split_gives_each_stage_its_layers() -> None:
    split = "+".join(["8"] * 14 + ["7"] * 2)
    run = told(
        model="llama3-405b", mesh="pp=16,tp=8", split=split, checkpointing="full", sequence=1024
    )
    kinds = ["0: 8 layers with embedding", "1: 8 layers", "14: 7 layers", "15: 7 layers with head"]
    assert [rank["rank"] for rank in run["memory_bytes"]] == [f"pp rank {kind}" for kind in kinds]
    counted_metric, even, uneven = (
        told(mesh="pp=2,tp=4", split=split)["step_seconds"] for split in ("", "16+16", "24+8")
    )
    assert uneven > 1.2 * even == 1.2 * counted_metric


def test_search_uses_its_options() -> None:
    options: dict[str, Any] = {"gpus": 4, "schedule": "1f1b"}
    assert {run["global_batch"] for run in told(**options)["best"]} == {4}
    runs = told(**options, global_batch=16, top=3, microbatch=2, checkpointing="full")["best"]
    assert len(runs) == 3
    assert {(run["global_batch"], run["microbatch"], run["checkpointing"]) for run in runs} == {
        (16, 2, "full")
    }


def test_chunks_limit_the_fewest_gpus() -> None:
    with pytest.raises(UserError, match=r"chunks\(3\)"):
        answer(
            given(
                model="tiny", gpus=2, global_batch=1, schedule="interleaved", chunks=3, sequence=63
            )
        )
    asked = given(mesh="pp=2", model="gpt-175b", schedule="interleaved", chunks=48, microbatches=4)
    assert (
        "smallest feasible: 64 GPUs as pp=2,tp=32" in answer(asked).problem
    )  # 96 layers are no 48 chunks on 3 ranks


def test_a_runs_fits_tell_a_calls_time_and_a_validation_is_shown_and_written(
    tmp_path: Path,
) -> None:
    case = make_case(
        "workload.ddp",
        "parbench.workloads.data_parallel.ddp:prepare",
        {"shape": "tiny", "microbatch": 4},
    )
    records = [
        *curve_records(),
        ok_record(
            case, metrics={"step_time": seconds_metric(0.02), "compute": counted_metric(0.01, "s")}
        ),
    ]
    run = make_run(make_plan([record.case for record in records]), records, ENVIRONMENT)
    path = write_run(tmp_path / "run", run)
    hardware, seconds, _ = machine_of(given(fits=path))
    assert seconds is not None
    assert hardware.name == path.name
    shown = typed("--model", "small-llama", "--mesh", "dp=2,tp=4", "--fits", str(path)).stdout
    assert f"fits of {path}" in shown
    assert "workload.ddp shape=tiny" in answer(Given(validate=path)).text
    assert json.loads((path / "plan.json").read_text())["rows"][0]["label"].startswith(
        "workload.ddp"
    )
    assert json.loads(answer(Given(validate=path, as_json=True)).text)["kind"] == "validation"
