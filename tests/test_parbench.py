"""The command line as a stranger meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command

SCRIPT = str(Path(sys.executable).with_name("parbench"))


def test_help_shows_every_command(parbench: Command) -> None:
    shown = parbench("--help")
    assert shown.returncode == 0
    for name in ("run", "list", "doctor", "report", "schema"):
        assert f"\n  {name} " in shown.stdout


def test_version_is_printed(parbench: Command) -> None:
    assert parbench("--version").stdout.startswith("parbench, version ")


def test_an_unknown_command_is_refused(parbench: Command) -> None:
    refused = parbench("rum")
    assert refused.returncode == 2
    assert "rum" in refused.stderr


def test_a_folder_named_bench_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise RuntimeError('shadowed')")
    shown = subprocess.run([SCRIPT, "list"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr


BAD_INPUT = {
    "size unit": (["--sizes", "1Z"], ["1Z", "K, M, G or T"]),
    "size order": (["--sizes", "4M:1K:x2"], ["4M:1K:x2", "4M > 1K"]),
    "no rank": (["--nproc", "0"], ["--nproc 0", "at least 2 ranks"]),
    "one rank": (["--nproc", "1"], ["one rank", "--allow-single"]),
    "case": (["--only", "al_reduce"], ["al_reduce", "did you mean 'all_reduce'"]),
    "full case": (["--only", "collective.allreduce"], ["collective.allreduce", "did you mean 'collective.all_reduce'"]),
    "dtype": (["--dtype", "float31"], ["float31", "float32", "did you mean"]),
    "float8 on gloo": (["--dtype", "float8_e4m3fn"], ["gloo carries no float8_e4m3fn"]),
    "parameter": (["--set", "layer=2"], ["layer", "did you mean 'layers'"]),
    "no equals sign": (["--set", "layers"], ["'layers'", "NAME=VALUE"]),
    "given twice": (["--set", "layers=1", "--set", "layers=2"], ["layers", "twice"]),
    "shape": (["--only", "ddp", "--set", "heads=3"], ["hidden(128) % heads(3) != 0"]),
    "unknown shape": (["--only", "ddp", "--set", "shape=smal"], ["'smal'", "tiny", "did you mean 'small'"]),
    "split": (["--only", "tp", "--nproc", "4", "--set", "heads=2"], ["heads(2) % tp(4) != 0"]),
    "mesh": (["--only", "tp_fsdp", "--nproc", "4", "--set", "tp=3"], ["dp(1) * tp(3) != world size(4)"]),
    "shards": (["--only", "hsdp", "--nproc", "4", "--set", "shard=3"], ["replicate(1) * shard(3) != world size(4)"]),
    "compute": (["--only", "ddp", "--set", "compute=timed:fast"], ["'fast'", "ms, s, m or h"]),
    "microbatches": (["--only", "pp", "--set", "schedule=dualpipe_v", "--set", "microbatches=3"], ["(3) >= stages(4)"]),
    "stages": (["--only", "pp", "--nproc", "3"], ["layers(4) % stages(3) != 0"]),
    "checkpointed halves": (["--only", "pp", "--set", "schedule=zb_h1", "--set", "checkpointing=full"], ["splits the"]),
    "no order": (["--only", "pp", "--set", "order=absent.csv"], ["absent.csv cannot be read"]),
    "empty injection": (["--inject", ""], ["--inject ''", "late:RANK:3ms"]),
    "empty link": (["--link", ""], ["link speed ''", "400Gbit"]),
    "preset": (["--preset", "nodes"], ["nodes", "did you mean 'node'"]),
    "backend": (["--backend", "mpi"], ["mpi", "gloo or nccl"]),
    "device": (["--device", "tpu"], ["tpu", "cpu or cuda"]),
    "launches": (["--launches", "0"], ["--launches 0", "at least 1"]),
    "budget": (["--budget", "soon"], ["soon", "90s"]),
    "timeout": (["--timeout", "-1s"], ["-1s"]),
    "plan file": (["--plan", "absent.toml"], ["absent.toml"]),
    "no run": (["--resume", "."], ["no run", "run.json"]),
    "resume and more": (["--resume", ".", "--preset", "smoke"], ["--resume", "leave out --preset"]),
    "target without function": (["--target", "faults"], ["faults", "package.module:function"]),
    "absent target": (["--target", "nowhere:prepare"], ["nowhere"]),
    "absent function": (["--target", "faults:nothing"], ["nothing"]),
    "odd size": (["--only", "all_reduce", "--sizes", "1001"], ["1001", "1000 and 1004"]),
    "too large": (["--only", "all_reduce", "--sizes", "64T"], ["64T", "a rank can have"]),
}


def test_an_order_that_deadlocks_is_drawn_and_starts_nothing(parbench: Command, tmp_path: Path) -> None:
    order = "order=0F0,0B0,0F1,0B1;1F1,1B1,1F0,1B0"
    refused = parbench("run", "--only", "pp", "--set", "microbatches=2", "--set", order)
    assert refused.returncode == 2
    said, head, *rows = refused.stderr.strip().splitlines()
    assert "deadlocks: rank 0 waits with 0B0 for 1B0, rank 1 waits with 1F1 for 0F1" in said
    assert head.split() == ["step", "0", "1", "2", "3"]
    assert [row.split() for row in rows] == [
        ["rank", "0", "0F0", ">0B0<", "0F1", "0B1"],
        ["rank", "1", ">1F1<", "1B1", "1F0", "1B0"],
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_sentence_and_starts_nothing(parbench: Command, tmp_path: Path, name: str) -> None:
    words, told = BAD_INPUT[name]
    refused = parbench("run", *words)
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout == ""
    lines = refused.stderr.strip().splitlines()
    assert len(lines) == 1, refused.stderr
    for part in told:
        assert part in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('nproc = "two"', ["plan.toml", "$.nproc"]),
        ("[[case]]\nname = 'ddp'\nsets = 1", ["plan.toml", "sets", "did you mean 'set'", "$.case[0]"]),
        ("preset = ", ["plan.toml", "TOML"]),
        ("[[case]]\nname = 'dddp'", ["dddp", "did you mean 'ddp'"]),
    ],
)
def test_a_bad_plan_file_is_one_sentence_with_the_place(
    parbench: Command, tmp_path: Path, text: str, told: list[str]
) -> None:
    (tmp_path / "plan.toml").write_text(text)
    refused = parbench("run", "--plan", "plan.toml")
    assert refused.returncode == 2
    [line] = refused.stderr.strip().splitlines()
    for part in told:
        assert part in line
    assert not (tmp_path / "runs").exists()
