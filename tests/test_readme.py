"""The commands of the README and of the documentation exist and run."""

import itertools
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.launch import measure
from parbench.bench.results.runs import Run, load_run
from parbench.reports.figures import svg
from parbench.reports.figures.chart import Chart
from parbench.reports.figures.svg import save_charts
from parbench.reports.render import page, show
from tests.support.fake_runs import FakeRanks, isolate_driver
from tests.support.fakes import make_outcome
from tests.support.golden import BASE, NEW, STEPS
from tests.support.paths import ROOT, Command
from tests.support.reports.exchange_fixtures import OSU

README = ROOT / "README.md"
GUIDES = ROOT / "docs" / "guides"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RUN_PLACEHOLDERS = {
    "RUN": STEPS,
    "RUN2": STEPS,
    "RUN4": STEPS,
    "RUN8": BASE,
    "BASE": BASE,
}
QWEN3_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
TESTED_ELSEWHERE = (
    "parbench slurm",  # tests/slurm, which start a cluster
    "parbench explain",  # tests/reports/traces, which have traces
    "parbench check",  # tests/bench/check
    "parbench doctor --selftest",  # tests/bench/test_selftest.py
    "parbench run my",  # custom steps, in the full tier
)
MEASURED_IN_FULL_TIER = ("run matrix", "run fsdp --set compute", "mystep:")
EXIT_CODES_OF_COMPARISONS = (0, 1, 3, 4)


def find_blocks(path: Path, language: str) -> list[str]:
    """Return the contents of the fenced code blocks of a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE)


def find_commands(path: Path) -> list[str]:
    """Return the shell lines of a page that call parbench, without prompts and comments."""
    commands = []
    for block in find_blocks(path, "console") + find_blocks(path, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            command, _, _ = line.removeprefix("$ ").partition(" > ")  # without the file
            args = shlex.split(command, comments=True)
            if "parbench" in args:
                commands.append(shlex.join(args))
    return commands


ALL_COMMANDS = [command for path in PAGES for command in find_commands(path)]
COMMANDS = sorted(set(ALL_COMMANDS))
COMMANDS_WITH_FAKE_RANKS = [
    command
    for command in COMMANDS
    if command.startswith("parbench ") and not command.startswith(TESTED_ELSEWHERE)
]
COMMANDS_OF_FULL_TIER = [
    command
    for command in COMMANDS
    if command.startswith("parbench run")
    and (command == "parbench run" or any(text in command for text in MEASURED_IN_FULL_TIER))
]


def resolve_command(args: list[str]) -> click.Command:
    """Return the click command that arguments after ``parbench`` call."""
    command: click.Command = cli.main
    for name in args:
        if not isinstance(command, click.Group):
            break
        subcommand = command.get_command(click.Context(command), name)
        assert subcommand is not None, f"parbench has no command {name}"
        command = subcommand
    return command


def test_every_command_and_option_exists() -> None:
    assert len(COMMANDS) > 40
    for line in COMMANDS:
        own_part = line[line.index("parbench ") :].split(" -- ")[0]
        args = shlex.split(own_part)[1:]
        command = resolve_command(args)
        known_options = {option for param in command.params for option in param.opts}
        used_options = {arg.partition("=")[0] for arg in args if arg.startswith("-")}
        assert used_options <= known_options, line


@pytest.fixture
def command_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the runs and files that README commands name."""
    isolate_driver(monkeypatch, tmp_path)
    for name, run in RUN_PLACEHOLDERS.items():
        shutil.copytree(run, tmp_path / name)
    shutil.copytree(NEW, tmp_path / "NEW")
    shutil.copytree(STEPS, tmp_path / "runs" / "20260101T000000Z-host-1a2b3c")
    for name in ("all_reduce.log", "osu_allreduce.txt"):
        (tmp_path / name).write_text(OSU)
    [cases] = [
        block
        for block in find_blocks(ROOT / "docs" / "reference" / "files.md", "toml")
        if "[[case]]" in block
    ]
    (tmp_path / "cases.toml").write_text(cases)
    [hardware] = find_blocks(GUIDES / "plan.md", "toml")
    (tmp_path / "mycluster.toml").write_text(hardware)
    (tmp_path / "limits.toml").write_text('"*" = { time = "<1s" }')
    (tmp_path / "Qwen3-32B").mkdir()
    (tmp_path / "Qwen3-32B" / "config.json").write_text(json.dumps(QWEN3_CONFIG))
    return tmp_path


def load_first_repetition(path: Path) -> Run:
    run = load_run(path)
    plan = msgspec.structs.replace(run.info.plan, repetitions=1)
    records = tuple(record for record in run.records if record.repetition == 0)
    info = msgspec.structs.replace(run.info, plan=plan)
    return msgspec.structs.replace(run, info=info, records=records)


def save_first_chart(
    charts: Iterable[Chart], folder: Path, formats: Sequence[str]
) -> list[Path]:
    return save_charts(itertools.islice(charts, 1), folder, formats)


@pytest.mark.parametrize("line", COMMANDS_WITH_FAKE_RANKS)
def test_command_runs_with_fake_ranks(
    line: str, command_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = FakeRanks()
    ranks.said = [make_outcome(1e-3 + 1e-5 * i) for i in range(200)]
    monkeypatch.setattr(measure, "choose_launcher", ranks.choose_launcher)
    monkeypatch.setattr(
        "parbench.reports.compare.ab.run_repetition",
        lambda *args, **options: load_first_repetition(command_folder / "BASE"),
    )
    # A search over fewer GPUs is faster.
    args = shlex.split(line.replace("--gpus 64", "--gpus 32"))[1:]
    if args[0] == "run":
        # Rendering the page takes seconds and has its own tests.
        monkeypatch.setattr(show, "render_report", lambda report, form: b"")
    if args[0] == "report":
        # So does drawing all figures.
        monkeypatch.setattr(page, "render_inline", lambda chart: "")
        monkeypatch.setattr(svg, "save_charts", save_first_chart)
    if args[0] == "run" and "--resume" not in args:
        args += ["--repetitions", "1"]
    if "main:10" in args or (args[0] == "history" and args[1] != "add"):
        CliRunner().invoke(
            cli.main, ["history", "add", str(BASE), str(NEW), "--branch", "main"]
        )
    result = CliRunner().invoke(cli.main, args)
    is_comparison = args[0] in ("compare", "history")
    allowed_codes = EXIT_CODES_OF_COMPARISONS if is_comparison else (0,)
    assert result.exit_code in allowed_codes, result.output
    assert result.stdout or "-o" in args or "annotate" in args


@pytest.mark.full
@pytest.mark.parametrize("line", COMMANDS_OF_FULL_TIER)
def test_command_measures(line: str, parbench: Command, tmp_path: Path) -> None:
    for block in find_blocks(GUIDES / "own-step.md", "python"):
        name, source = block.split("\n", 1)
        (tmp_path / name.removeprefix("# ")).write_text(source)
    (tmp_path / "limits.toml").write_text('"workload.ddp" = { step_time = "<60s" }')
    args = shlex.split(line)[1:]
    completed = parbench(*args, "--budget", "8s", "--repetitions", "1")
    assert completed.returncode in (0, 4), completed.stdout + completed.stderr
    assert " results match the reference" in completed.stdout
    assert completed.stdout.splitlines()[-1].startswith("runs/")


def test_guide_installs_the_pinned_torch() -> None:
    [pin] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin in (ROOT / "docs" / "getting-started.md").read_text()


def test_linked_files_exist() -> None:
    pattern = r"(?:\]\(|srcset=\"|src=\")([^)#\"@]+)"
    names = set(re.findall(pattern, README.read_text()))
    assert "docs/report-dark.webp" in names
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("page_name", "word"), [("metrics", "busbw"), ("glossary", "breakpoint")]
)
def test_hooks_print_generated_pages(
    page_name: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hooks = ROOT / "docs" / "hooks.py"
    monkeypatch.setattr(sys, "argv", [str(hooks), f"{ROOT}/docs/reference/{page_name}.md"])
    runpy.run_path(str(hooks), run_name="__main__")
    text = capsys.readouterr().out
    assert word in text
    assert "<!--" not in text
