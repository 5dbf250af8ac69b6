"""The command line as a stranger meets it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from parbench import cli as command_line
from tests.support.paths import Command

BAD_INPUT = {
    "size unit": (["--sizes", "1Z"], ["1Z", "K, M, G or T"]),
    "size order": (["--sizes", "4M:1K:x2"], ["4M:1K:x2", "4M > 1K"]),
    "no rank": (["--nproc", "0"], ["--nproc 0", "at least 2 ranks"]),
    "one name": (
        ["--only", "ddp", "--set", "compute=50ms"],
        ["parbench: compute = '50ms' is not allowed"],
    ),
    "one rank": (["--nproc", "1"], ["one rank", "--allow-single"]),
    "case": (["--only", "al_reduce"], ["al_reduce", "did you mean 'all_reduce'"]),
    "full case": (
        ["--only", "collective.allreduce"],
        ["collective.allreduce", "did you mean 'collective.all_reduce'"],
    ),
    "dtype": (["--dtype", "float31"], ["float31", "float32", "did you mean"]),
    "float8 on gloo": (["--dtype", "float8_e4m3fn"], ["gloo carries no float8_e4m3fn"]),
    "parameter": (["--set", "layer=2"], ["layer", "did you mean 'layers'"]),
    "no equals sign": (["--set", "layers"], ["'layers'", "NAME=VALUE"]),
    "given twice": (["--set", "layers=1", "--set", "layers=2"], ["layers", "twice"]),
    "shape": (["--only", "ddp", "--set", "heads=3"], ["hidden(128) % heads(3) != 0"]),
    "long number": (
        ["--only", "ddp", "--set", f"layers={2**64}"],
        [f"layers = '{2**64}'", "at most 64 bits"],
    ),
    "large number": (
        ["--only", "ddp", "--set", "bucket_mb=1e31"],
        ["bucket_mb = '1e31'", "at most"],
    ),
    "many launches": (["--only", "ddp", "--launches", f"{10**26}"], ["launches", "65536"]),
    "many ranks": (["--nproc", f"{10**26}"], ["at most 4096 ranks"]),
    "long time": (["--timeout", "99999999h"], ["'99999999h'", "more than 500h"]),
    "unknown shape": (
        ["--only", "ddp", "--set", "shape=smal"],
        ["'smal'", "tiny", "did you mean 'small'"],
    ),
    "split": (["--only", "tp", "--nproc", "4", "--set", "heads=2"], ["heads(2) % tp(4) != 0"]),
    "mesh": (
        ["--only", "tp_fsdp", "--nproc", "4", "--set", "tp=3"],
        ["dp(1) * tp(3) != world size(4)"],
    ),
    "shards": (
        ["--only", "hsdp", "--nproc", "4", "--set", "shard=3"],
        ["replicate(1) * shard(3) != world size(4)"],
    ),
    "compute": (["--only", "ddp", "--set", "compute=timed:fast"], ["'fast'", "ms, s, m or h"]),
    "microbatches": (
        ["--only", "pp", "--set", "schedule=dualpipe_v", "--set", "microbatches=3"],
        ["(3) >= stages(4)"],
    ),
    "stages": (["--only", "pp", "--nproc", "3"], ["layers(4) % stages(3) != 0"]),
    "checkpointed halves": (
        ["--only", "pp", "--set", "schedule=zb_h1", "--set", "checkpointing=full"],
        ["splits the"],
    ),
    "no order": (["--only", "pp", "--set", "order=absent.csv"], ["absent.csv cannot be read"]),
    "empty injection": (["--inject", ""], ["--inject ''", "tests.support.late:RANK:3ms"]),
    "empty link": (["--link", ""], ["link speed ''", "400Gbit"]),
    "preset": (["--preset", "nodes"], ["nodes", "did you mean 'node'"]),
    "backend": (["--backend", "mpi"], ["mpi", "gloo or nccl"]),
    "device": (["--device", "tpu"], ["tpu", "cpu or cuda"]),
    "launches": (["--launches", "0"], ["--launches 0", "from 1 to"]),
    "budget": (["--budget", "soon"], ["soon", "90s"]),
    "timeout": (["--timeout", "-1s"], ["-1s"]),
    "plan file": (["--plan", "absent.toml"], ["absent.toml"]),
    "no run": (["--resume", "."], ["no run", "run.json"]),
    "no folder": (["--resume", "nope"], ["parbench: no such folder: nope"]),
    "resume and more": (["--resume", ".", "--preset", "smoke"], ["--resume", "leave out --preset"]),
    "target without function": (["--target", "faults"], ["faults", "package.module:function"]),
    "absent target": (["--target", "nowhere:prepare"], ["nowhere"]),
    "absent function": (["--target", "tests.support.faults:nothing"], ["nothing"]),
    "odd size": (["--only", "all_reduce", "--sizes", "1001"], ["1001", "1000 and 1004"]),
    "too large": (["--only", "all_reduce", "--sizes", "64T"], ["64T", "a rank can have"]),
}


PLAN_FILES = {
    'nproc = "two"': ["plan.toml", "$.nproc"],
    "[[case]]\nname = 'ddp'\nsets = 1": ["plan.toml", "sets", "did you mean 'set'", "$.case[0]"],
    "preset = ": ["plan.toml", "TOML"],
    "[[case]]\nname = 'dddp'": ["dddp", "did you mean 'ddp'"],
}


def test_help_and_version_answer_and_an_unknown_command_is_refused(parbench: Command) -> None:
    shown = parbench("--help")
    assert shown.returncode == 0
    for name in ("run", "list", "doctor", "report", "schema"):
        assert f"\n  {name} " in shown.stdout
    assert parbench("--version").stdout.startswith("parbench, version ")
    refused = parbench("rum")
    assert refused.returncode == 2
    assert "No such command 'rum'. Did you mean 'run'?" in refused.stderr
    assert parbench("run", "-h").stdout == parbench("run", "--help").stdout


def test_without_words_it_names_three_things_to_try_each_of_which_can_be_typed() -> None:
    shown = CliRunner().invoke(command_line.main)
    assert shown.exit_code == 0
    tries = [line.split() for line in shown.stdout.splitlines() if line.startswith("  parbench ")]
    assert [words[1] for words in tries] == ["run", "doctor", "plan"]
    assert len(shown.stdout.splitlines()) < 10
    planned = CliRunner().invoke(command_line.main, tries[2][1 : tries[2].index("predict")])
    assert (planned.exit_code, "tokens/s" in planned.stdout) == (0, True)


def test_every_summary_is_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["history"], ["slurm"]):
        _, _, rest = (
            CliRunner()
            .invoke(command_line.main, [*group, "--help"])
            .stdout.partition("Commands:\n")
        )
        lines = rest.partition("\n\n")[0].splitlines()
        assert len(lines) >= 6
        for line in lines:
            assert re.fullmatch(r"  [a-z-]+ +[A-Z].*[^.][.?]", line), line


def test_bash_completes_commands_and_options() -> None:
    words = {
        "parbench ru": "run",
        "parbench history an": "annotate",
        "parbench run --bud": "--budget --budgets",
    }
    script = """eval "$(_PARBENCH_COMPLETE=bash_source parbench)"; complete -p parbench; COMP_WORDS=($TYPED)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _parbench_completion parbench; echo "${COMPREPLY[@]}" """
    for typed, found in words.items():
        variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TYPED": typed}
        bash = ["bash", "--norc", "-ec", script]
        done = subprocess.run(
            bash, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines() == [
            "complete -o nosort -F _parbench_completion parbench",
            found,
        ], done.stderr


def test_what_is_no_finding_does_not_exit_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, told in (
        (KeyboardInterrupt(), "parbench: interrupted"),
        (MemoryError(), "parbench: the memory is full"),
        (ImportError("x.so: failed to map segment"), "parbench: x.so: failed to map segment"),
        (KeyError("a defect"), "KeyError: 'a defect'"),
    ):
        monkeypatch.setattr(
            "parbench.bench.plan.listing.render_names", mock.Mock(side_effect=error)
        )
        stopped = CliRunner().invoke(command_line.main, ["list"])
        assert (stopped.exit_code, stopped.stderr.splitlines()[-1]) == (4, told)


def test_an_interrupt_while_the_first_module_is_read_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finder = mock.Mock(find_spec=mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.delitem(sys.modules, "parbench.bench.text")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    stopped = CliRunner().invoke(command_line.main, ["list"])
    assert (stopped.exit_code, stopped.stderr) == (4, "parbench: interrupted\n")


def refusal(*words: str) -> list[str]:
    refused = CliRunner().invoke(command_line.main, ["run", *words])
    assert refused.exit_code == 2, (words, refused.output)
    assert refused.stdout == "", words
    assert not Path("runs").exists(), words
    return refused.stderr.strip().splitlines()


def test_bad_input_is_one_sentence_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (words, told) in BAD_INPUT.items():
        [line] = refusal(*words)
        assert all(part in line for part in told), (name, line)
    for text, told in PLAN_FILES.items():
        Path("plan.toml").write_text(text)
        [line] = refusal("--plan", "plan.toml")
        assert all(part in line for part in told), (text, line)


def test_a_process_of_its_own_refuses_as_its_commands_do(parbench: Command, tmp_path: Path) -> None:
    refused = parbench("run", "--nproc", "0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_order_that_deadlocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    order = "order=0F0,0B0,0F1,0B1;1F1,1B1,1F0,1B0"
    message = "\n".join(refusal("--only", "pp", "--set", "microbatches=2", "--set", order))
    assert "deadlock" in message
    assert "0B0" in message
    assert "1F1" in message


def test_ranks_do_not_import_from_the_current_folder(parbench: Command, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "parbench").mkdir()  # the folder of a clone, seen from its parent
    done = parbench(
        "run", "--only", "barrier", "--nproc", "2", "--launches", "1", "--budget", "60s"
    )
    assert done.returncode == 0, done.stderr


def test_resume_measures_what_the_budget_left_out(parbench: Command) -> None:
    cut = parbench(
        "run", "--only", "barrier", "--nproc", "2", "--launches", "4", "--budget", "500ms"
    )
    assert cut.returncode == 4
    done = parbench("run", "--resume", "runs/latest", "--budget", "20s")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^COMPLETE +1 case, 4 launches each$", done.stdout, re.MULTILINE)


def test_a_name_that_no_system_has_and_a_number_that_sizes_loops_are_one_sentence(
    tmp_path: Path,
) -> None:
    name = "x" * 300
    for words in (
        ("show", name),
        ("slurm", "status", name),
        ("history", "list", "--history", name),
        ("compare", name, name),
        ("plan", "--model", "tiny", "--mesh", "dp=99999999999"),
        ("plan", "--model", "tiny", "--mesh", "dp=1000,tp=1000"),
        ("plan", "--model", "tiny", "--mesh", "dp=8", "--microbatch", "9" * 26),
        ("plan", "--model", "tiny", "--mesh", "dp=8", "--sequence", "9" * 26),
        ("history", "prune", "--keep", "9" * 26),
    ):
        done = CliRunner().invoke(command_line.main, words)
        assert done.exit_code == 2, (words, done.output)
        assert "Traceback" not in done.stderr, words
