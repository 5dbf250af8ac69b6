"""The READMEs are true: their commands run, their tables are current, and the first is short and in short sentences."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.launch import measure as measuring
from parbench.bench.results.runs import Run, load_run
from parbench.reports.render import show
from tests.support.exchange_fixtures import OSU
from tests.support.fake_runs import FakeRanks, isolate_driver
from tests.support.fakes import make_outcome
from tests.support.golden import BASE, GOLDEN, NEW, STEPS, with_tables
from tests.support.paths import ROOT, Command

FIRST = ROOT / "README.md"
READMES = (
    FIRST,
    *(ROOT / name / "README.md" for name in ("bench", "workloads", "reports", "slurm")),
)
RUNS = {"RUN": STEPS, "RUN2": STEPS, "RUN4": STEPS, "RUN8": BASE, "BASE": BASE, "NEW": NEW}
QWEN3 = {  # the sizes that the model's card gives
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
ELSEWHERE = (
    "slurm",  # in tests/slurm, which need a cluster
    "torchrun",  # tests/bench/launch/test_other_launchers.py, as mpirun
    "mpirun",
    "salloc",
    "explain",  # tests/reports/traces, which have traces
    "check",  # tests/bench/check
    "doctor --selftest",  # tests/bench/test_selftest.py
    "run --target",  # in the full tier
)


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def lines() -> Iterator[tuple[Path, str]]:
    """Yield each line of a shell in which parbench is called, without its comment."""
    for path in READMES:
        for block in (*blocks(path, "console"), *blocks(path, "sh")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if "parbench" in words:
                    yield path, shlex.join(words)


COMMANDS = list(dict.fromkeys(line for _, line in lines()))
IN_FULL = [
    line
    for line in COMMANDS
    if line == "parbench run"
    or any(word in line for word in ("--only matrix", "compute=timed:50ms", "mystep:"))
]


def here(line: str) -> bool:
    return line.startswith("parbench ") and not any(
        line.startswith(("parbench " + word, word)) for word in ELSEWHERE
    )


def leaf(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that a line of the shell calls, within its groups, and the words after its name."""
    command: click.Command = cli.main
    rest = words[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, words
        command, rest = found, rest[1:]
    return command, rest


def test_every_command_and_option_exists() -> None:
    assert len(COMMANDS) > 40
    for line in COMMANDS:
        for part in line[line.index("parbench ") :].split(" -- "):
            if part.startswith("parbench "):
                command, rest = leaf(shlex.split(part))
                known = {opt for param in command.params for opt in param.opts}
                assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= known, (
                    line
                )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder with kept runs and with the files that the commands name."""
    isolate_driver(monkeypatch, tmp_path)
    for name, run in {**RUNS, "runs/20260101T000000Z-host-1a2b3c": STEPS}.items():
        shutil.copytree(run, tmp_path / name)
    for name in ("all_reduce.log", "osu_allreduce.txt"):
        (tmp_path / name).write_text(OSU)
    [plan] = [block for block in blocks(ROOT / "bench" / "README.md", "toml") if "preset" in block]
    (tmp_path / "plan.toml").write_text(plan)
    (tmp_path / "budgets.toml").write_text('"*" = { time = "<1s" }')
    (tmp_path / "Qwen3-32B").mkdir()
    (tmp_path / "Qwen3-32B" / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


@pytest.mark.parametrize("line", [line for line in COMMANDS if here(line)])
def test_a_command_does_what_can_be_done_with_ranks_that_are_threads(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = FakeRanks()
    ranks.said = [make_outcome(1e-3 + 1e-5 * i) for i in range(200)]
    monkeypatch.setattr(measuring, "_starter", ranks.starter)
    monkeypatch.setattr(
        "parbench.reports.regression.ab.launch_run", lambda *_, **__: one_launch(place)
    )
    words = shlex.split(line)[1:]
    if words[0] == "run":
        words += [] if "--resume" in line else ["--launches", "1"]
        monkeypatch.setattr(
            show, "rendered", lambda report, form: b""
        )  # the page takes seconds, and has its own tests
    if words[0] == "compare" and "last:10" in words:
        assert (
            CliRunner().invoke(cli.main, ["history", "add", *map(str, (BASE, NEW))]).exit_code == 0
        )
    done = CliRunner().invoke(cli.main, words)
    regressed = words[0] in ("compare", "history") and done.exit_code in (1, 3, 4)
    assert regressed or done.exit_code == 0, done.output
    assert done.stdout or words[:2] == ["export", "latest"]


def one_launch(folder: Path) -> Run:
    run = load_run(folder / "BASE")
    plan = msgspec.structs.replace(run.info.plan, launches=1)
    first = tuple(record for record in run.records if record.launch == 0)
    return msgspec.structs.replace(
        run, info=msgspec.structs.replace(run.info, plan=plan), records=first
    )


@pytest.mark.full
@pytest.mark.parametrize("line", IN_FULL)
def test_a_run_of_the_first_readme_or_of_ones_own_step_measures(
    line: str, parbench: Command, tmp_path: Path
) -> None:
    for block in blocks(ROOT / "workloads" / "README.md", "python"):
        name, text = block.split("\n", 1)
        (tmp_path / name.removeprefix("# ")).write_text(text)
    (tmp_path / "budgets.toml").write_text('"workload.ddp" = { step_time = "<60s" }')
    done = parbench(
        *shlex.split(line)[1:], "--budget", "20s", "--launches", "1"
    )  # the last --budget counts
    assert done.returncode in (0, 4), done.stdout + done.stderr
    assert " results equal the reference" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("runs/")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_generated_tables_are_current(path: Path) -> None:
    text = path.read_text()
    assert with_tables(text) == text, "make golden renews them"
    assert path.parent.name not in ("bench", "workloads") or "<!-- parbench list" in text


def test_the_first_readmes_page_has_the_shape_of_one_that_is_printed() -> None:
    [page] = [block for block in blocks(FIRST, "text") if "CORRECT" in block]
    *shown, folder = page.splitlines()
    assert max(map(len, shown)) <= 80
    assert re.fullmatch(r"runs/\d{8}T\d{6}Z-\w+-[0-9a-f]{6}", folder)
    kept = (GOLDEN / "steps.first.txt").read_text()
    heads = [
        re.findall(r"^(Operations|Training steps|Look at first|All rows)\b", one, re.MULTILINE)
        for one in (page, kept)
    ]
    assert heads[0] == heads[1] == ["Operations", "Training steps", "Look at first", "All rows"]
    assert [line.split()[0] for line in shown[1:4]] == ["CORRECT", "COMPLETE", "NOISY"]


def test_the_pictures_and_pages_that_the_first_readme_names_are_there() -> None:
    text = FIRST.read_text()
    names = re.findall(r"(?:\]\(|srcset=\"|src=\"|uses: OWNER/parbench/)([^)#\"@]+)", text)
    assert {"docs/report-dark.webp", "docs/report-light.webp", ".github/actions/parbench"} < set(
        names
    )
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_first_two_commands_are_one_installation_and_the_tests() -> None:
    install, tests = blocks(FIRST, "sh")
    for block in (install, tests):
        assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
    assert "-m pytest" in tests
    assert install.splitlines()[1] == ".venv/bin/parbench run"
