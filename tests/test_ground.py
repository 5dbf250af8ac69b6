"""parbench where others have it: installed from its wheel, for an ordinary user, in folders and limits of theirs."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from parbench.bench.results.runs import load_run
from tests.support.paths import ROOT

pytestmark = pytest.mark.full
NOBODY = 65534
PACKAGES = ("bench", "workloads", "reports", "slurm")
FOR_READERS = ("README.md", "example.toml")
QUICK = "--preset smoke --budget 60s --launches 1 --nproc 2"
# it leaves a child in a session of its own, and one that it forks
LITTERING = """
import atexit, os, subprocess, sys, time
import torch, torch.distributed as dist
from parbench.bench.world.benchmark import Benchmark
atexit.register(print, "printed as Python ends")
print("printed at import")

def prepare(world, *, number: int = 1):
    class Step(Benchmark):
        def __init__(self):
            self.sum = torch.zeros(1)
            subprocess.Popen(["sleep", "4321"], start_new_session=True)
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "4321"])
        def step(self):
            dist.all_reduce(self.sum, group=world.group)
        def reset(self):
            self.sum.fill_(number)
        def check(self):
            return int(self.sum.item() != world.size * number)
    return Step()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "parbench", source / "parbench", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(source),
    ]
    subprocess.run(words, check=True)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which finds what it needs among the tests' own packages."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "tests-own.pth").write_text(sysconfig.get_path("purelib"))
    pip = [
        str(folder / "bin/python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    return folder / "bin/python"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a space in its name that has modules of the names of ours, all of which raise."""
    folder = tmp_path / "a folder  of mine"
    folder.mkdir()
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('shadowed {name}')")
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    return folder


def as_anyone(
    python: Path, home: Path, words: str, limits: str = "true"
) -> "subprocess.CompletedProcess[str]":
    """Run parbench in a shell with limits, by an ordinary user, who has no home, no TMPDIR, and a C locale."""
    variables = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
    }
    variables |= {"PYTHONCOERCECLOCALE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    drop: list[str] = []
    if (
        os.getuid() == 0
    ):  # who may have to read what root alone may, such as an interpreter in root's home
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        drop += [f"--{which}-caps=-all,+dac_read_search" for which in ("inh", "ambient")]
    shell = ["bash", "-c", f"{limits}\nexec parbench {words}"]
    return subprocess.run(
        [*drop, *shell],
        cwd=home,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_wheel_holds_all_that_is_not_for_readers_of_the_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    there = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    there = {
        path for path in there if "__pycache__" not in path.parts and path.name not in FOR_READERS
    }
    own = {path for path in (ROOT / "parbench").iterdir() if path.is_file()}
    assert packed == {
        *(str(path.relative_to(ROOT)) for path in own),
        *(f"parbench/{path.relative_to(ROOT)}" for path in there),
    }


def test_an_ordinary_user_with_few_files_one_core_and_modules_of_our_names_measures_and_leaves_no_process(
    python: Path, home: Path
) -> None:
    (home / "mystep.py").write_text(LITTERING)
    done = as_anyone(
        python,
        home,
        f"run {QUICK} --target mystep:prepare",
        "ulimit -n 64; taskset -cp 0 $$ >/dev/null",
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    left = subprocess.run(
        ["pgrep", "-f", "^sleep 4321$"], capture_output=True, text=True, check=False
    )
    assert left.stdout == "", "what a step started and left behind"
    [path] = (home / "runs").iterdir()
    assert path.stat().st_uid == (NOBODY if os.getuid() == 0 else os.getuid())
    assert [record.status for record in load_run(path).records] == ["ok"]
    for words in (
        "show --all runs/latest",
        "report runs/latest -o page.html",
        "history add runs",
        "list",
        "doctor",
        "plan --model llama3-8b --gpus 64 -o plan.html",
        "run --resume runs/latest",
    ):
        done = as_anyone(python, home, words)
        assert done.returncode == 0, (words, done.stderr)
    assert "mystep" in (home / "page.html").read_text(encoding="utf-8")
    assert as_anyone(python, home, f"run {QUICK} --out /nowhere").returncode == 2


THEIR_TEST = """
import bench, reports, workloads

def test_packages_are_ours():
    assert (bench.OWNER, reports.OWNER, workloads.OWNER) == ("them", "them", "them")
"""
THEIR_STEP = """
import bench
import torch
import torch.distributed as dist
from parbench import Benchmark

class AllReduce(Benchmark):
    def __init__(self, world):
        assert bench.OWNER == "them"
        self.world = world
        self.buffer = torch.ones(1024)

    def step(self):
        dist.all_reduce(self.buffer, group=self.world.group)

    def reset(self):
        self.buffer.fill_(1.0)

    def check(self):
        return int((self.buffer != self.world.size).sum())

def prepare(world):
    return AllReduce(world)
"""


def test_project_with_packages_of_the_same_names(python: Path, tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'them'")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_theirs.py").write_text(THEIR_TEST)
    (tmp_path / "conftest.py").touch()
    (tmp_path / "theirmodule.py").write_text(THEIR_STEP)
    for command in (
        ["-m", "pytest"],
        ["-P", "-m", "pytest"],
    ):  # the second has the path of the program `pytest`
        done = subprocess.run(
            [python, *command, "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    run = f"run --target theirmodule:prepare --nproc 2 --launches 1 --budget 60s --out {tmp_path / 'runs'}"
    subprocess.run(
        [python.with_name("parbench"), *run.split()], cwd=tmp_path, check=True, capture_output=True
    )
    [record] = load_run(next((tmp_path / "runs").glob("*Z-*"))).records
    assert (record.case.name, record.status) == ("custom.theirmodule", "ok")


def test_too_few_files_too_little_memory_and_a_killed_command_are_told_and_leave_no_process(
    python: Path, home: Path
) -> None:
    done = as_anyone(python, home, f"run {QUICK} --only all_reduce --sizes 1K", "ulimit -n 16")
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert "open files" in done.stderr
    done = as_anyone(python, home, f"run {QUICK} --only all_reduce --sizes 1K", "ulimit -v 300000")
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert "the memory is full" in done.stderr
    (home / "slow.py").write_text("import time; time.sleep(4321)")
    done = as_anyone(
        python, home, f"run {QUICK} --target slow:prepare", "( sleep 6; kill -KILL $$ ) &"
    )
    assert done.returncode == -9, done.stderr
    left = subprocess.run(
        ["pgrep", "-f", shlex.quote("slow:prepare")], capture_output=True, text=True, check=False
    )
    assert left.stdout == "", "what imports a step to plan it"
