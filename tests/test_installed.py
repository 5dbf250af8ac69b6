"""parbench installed from its wheel, used by an ordinary user in other folders and limits."""

import os
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
from tests.support.slurm.processes import find_processes

pytestmark = pytest.mark.full
NOBODY_UID = 65534
PACKAGES = ("bench", "workloads", "reports", "slurm")
NOT_PACKAGED = ("README.md", "example.toml")
RUN = "run --preset smoke --budget 60s --repetitions 1 --nproc 2"

BENCHMARK_WITH_CHILDREN = """
import atexit, os, subprocess
import torch, torch.distributed as dist
from parbench import Benchmark

atexit.register(print, "printed as Python ends")
print("printed at import")

class Sum(Benchmark):
    def __init__(self, world):
        self.world = world
        self.sum = torch.zeros(1)
        subprocess.Popen(["sleep", "4321"], start_new_session=True)
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "4321"])

    def step(self):
        dist.all_reduce(self.sum, group=self.world.group)

    def reset(self):
        self.sum.fill_(1)

    def check(self):
        return int(self.sum.item() != self.world.size)

def prepare(world):
    return Sum(world)
"""


def isolated_environment() -> dict[str, str]:
    """Return the environment without ``PYTHONPATH``, which names the checkout in tests."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    ignore_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "parbench", source / "parbench", ignore=ignore_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and the dependencies of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=True)
    [site_packages] = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    interpreter = folder / "bin" / "python"
    options = ["-q", "--no-deps", "--no-index", str(wheel)]
    pip = [str(interpreter), "-m", "pip", "install", *options]
    subprocess.run(pip, env=isolated_environment(), check=True)
    return interpreter


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder of an ordinary user with a space in its name and modules that raise on import."""
    folder = tmp_path / "my  folder"
    folder.mkdir()
    for package in PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(
            f"raise RuntimeError('shadowed {package}')"
        )
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY_UID, NOBODY_UID)
    return folder


def run_as_user(
    python: Path, folder: Path, args: str, limits: str = "true"
) -> "subprocess.CompletedProcess[str]":
    """Run parbench after shell limits as a user without home folder and with a C locale."""
    variables = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    drop_privileges: list[str] = []
    if os.getuid() == 0:
        # The interpreter may lie in the home folder of root, so reading stays allowed.
        drop_privileges = [
            "setpriv",
            f"--reuid={NOBODY_UID}",
            f"--regid={NOBODY_UID}",
            "--clear-groups",
            "--inh-caps=-all,+dac_read_search",
            "--ambient-caps=-all,+dac_read_search",
        ]
    return subprocess.run(
        [*drop_privileges, "bash", "-c", f"{limits}\nexec parbench {args}"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_wheel_contains_all_files_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT)) for path in (ROOT / "parbench").iterdir() if path.is_file()
    }
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            is_cache = "__pycache__" in path.parts
            if path.is_file() and not is_cache and path.name not in NOT_PACKAGED:
                expected.add(f"parbench/{path.relative_to(ROOT)}")
    assert packaged == expected


def test_ordinary_user_with_limits_measures(python: Path, user_folder: Path) -> None:
    (user_folder / "mystep.py").write_text(BENCHMARK_WITH_CHILDREN)
    limits = "ulimit -n 64; taskset -cp 0 $$ >/dev/null"
    completed = run_as_user(python, user_folder, f"{RUN} mystep:prepare", limits)
    assert completed.returncode == 0, completed.stderr
    assert max(map(len, completed.stdout.splitlines())) <= 80
    assert find_processes("sleep\x004321") == []
    [path] = (user_folder / "runs").iterdir()
    assert path.stat().st_uid == (NOBODY_UID if os.getuid() == 0 else os.getuid())
    assert [record.status for record in load_run(path).records] == ["ok"]
    for args in (
        "show --all runs/latest",
        "report runs/latest -o page.html",
        "history add runs",
        "list",
        "doctor",
        "plan search --model llama3-8b --gpus 64 --format html",
        "run --resume runs/latest",
    ):
        completed = run_as_user(python, user_folder, args)
        assert completed.returncode == 0, (args, completed.stderr)
    assert "mystep" in (user_folder / "page.html").read_text(encoding="utf-8")
    assert run_as_user(python, user_folder, f"{RUN} --out /nowhere").returncode == 2


@pytest.mark.parametrize(
    ("limit", "exit_code", "message"),
    [
        ("ulimit -v 300000", 4, "failed to map"),
    ],
)
def test_exceeded_limit_is_reported(
    python: Path,
    user_folder: Path,
    limit: str,
    exit_code: int,
    message: str,
) -> None:
    args = f"{RUN} all_reduce --sizes 1K"
    completed = run_as_user(python, user_folder, args, limit)
    assert completed.returncode == exit_code, completed.stderr
    assert "Traceback" not in completed.stderr
    assert message in completed.stderr
