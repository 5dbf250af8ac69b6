"""A launch of a side: the command it is, the variables it has, and the words for what goes wrong."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from history_fixtures import put
from test_child import wait_for

from bench.errors import UserError
from reports.comparing.ab import parse_side
from reports.comparing.ab_launch import OURS, SHORTEST_SECONDS, Launcher, check_words

FAKE = """#!{python}
import os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
number = len(list(folder.glob("*"))) if folder.exists() else 0
shutil.copytree({run!r}, folder / f"run-{{number}}")
(folder / f"run-{{number}}" / "told").write_text("\\n".join([os.environ.get("X", ""), *sys.argv[1:]]))
"""


def fake(tmp_path: Path) -> str:
    """Return a Python that writes a run instead of measuring one, and what it was told."""
    script = tmp_path / "python"
    script.write_text(FAKE.format(python=sys.executable, run=str(put(tmp_path / "template", 0))))
    script.chmod(0o755)
    return str(script)


def launcher(tmp_path: Path, seconds: float = 60.0, words: tuple[str, ...] = ("--only", "ddp")) -> Launcher:
    return Launcher(out=tmp_path / "out", words=words, seconds=seconds, tell=lambda text: None)


def test_a_launch_is_a_run_with_the_sides_variables(tmp_path: Path) -> None:
    side = parse_side("b", "X=7", fake(tmp_path))
    runs = [launcher(tmp_path).launch(side) for _ in range(2)]
    assert [run.path for run in runs] == [tmp_path / "out" / "b" / f"run-{i}" for i in range(2)]
    variable, *words = (runs[0].path / "told").read_text().splitlines()
    assert variable == "7"
    assert words[:6] == ["-P", "-m", "parbench", "run", "--only", "ddp"]
    assert words[6:10] == ["--launches", "1", "--budget", "60s"]


def test_a_launch_has_time_to_start(tmp_path: Path) -> None:
    run = launcher(tmp_path, seconds=1.0).launch(parse_side("a", "", fake(tmp_path)))
    assert f"{SHORTEST_SECONDS:.0f}s" in (run.path / "told").read_text().splitlines()


def test_who_waits_is_told_of_each_launch(tmp_path: Path) -> None:
    told: list[str] = []
    one = Launcher(out=tmp_path / "out", words=(), seconds=1.0, tell=told.append)
    one.launch(parse_side("a", "X=7", python := fake(tmp_path)))
    assert told == [f"A: {python} X=7"]


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent-python cannot be started"):
        launcher(tmp_path).launch(parse_side("a", "", "absent-python"))


def test_bad_options_of_run_are_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="side A has no run: no case is named 'all_reduse'"):
        launcher(tmp_path, words=("--only", "all_reduse", "--nproc", "2")).launch(parse_side("a", "X=1"))


SLOW = """#!{python}
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
def stop(number, frame):
    time.sleep(0.2)
    (folder / "stopped").touch()
    sys.exit(4)
signal.signal(signal.SIGTERM, stop)
folder.mkdir(parents=True)
(folder / "begun").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("command", ["ab", "aa"])
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_launch_and_begins_no_other(tmp_path: Path, command: str, sign: signal.Signals) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(SLOW.format(python=sys.executable))
    python.chmod(0o755)
    script = f"import sys; from parbench import main; sys.executable = {str(python)!r}; main()"
    sides = ["--a", "X=1", "--b", "X=2"] if command == "ab" else ["--floor", str(tmp_path / "floor.json")]
    words = [sys.executable, "-c", script, command, *sides, "--out", str(out)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as session:
        wait_for((out / "a" / "begun").exists)
        session.send_signal(sign)
        _, told = session.communicate(timeout=20)
    assert session.returncode == 4, "1 would be a regression"
    assert (out / "a" / "stopped").exists(), "it was waited for"
    assert not (out / "b").exists()
    assert told.splitlines()[-1] == f"interrupted: nothing more is launched, and what was measured is in {out}"


@pytest.mark.parametrize("word", [*OURS, "--budget=5s"])
def test_what_ab_sets_itself_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="is for parbench ab to set"):
        check_words(["--only", "ddp", word])
    check_words(["--only", "ddp", "--nproc", "2"])
