"""Runs as nobody wrote them: what is damaged costs itself alone, in a sentence, and nothing is written elsewhere."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hostile import BOMBS, bomb, dumped, nested
from kineto_files import RankFile
from paths import TESTS

from parbench import cli
from parbench.bench.results.records import read_records
from parbench.bench.results.runs import trace_name

Raw = dict[str, Any]
STEPS = TESTS / "golden" / "runs" / "steps"
LINES = (STEPS / "records.jsonl").read_bytes().splitlines(keepends=True)
# of a collective, a pingpong and a step with a timeline
KEPT = [line for line in LINES if json.loads(line)["case"]["name"] in ("p2p.pingpong", "workload.zero3")]
KEPT = [LINES[0], *KEPT, *(line for line in LINES if b"0bbe8893432d" in line)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "run"
    shutil.copytree(STEPS, path)
    (path / "records.jsonl").write_bytes(b"".join(KEPT))
    return path


def commands(run: Path) -> list[tuple[str, ...]]:
    forms = (("chrome-trace", "out"), ("hta", "out/hta"), ("nccl-tests", "out/text.txt"), ("csv", "out/rows.csv"))
    return [
        ("report", str(run), "-o", "out/report.html"),
        ("show", "--all", str(run)),
        *(("export", str(run), "--format", form, "-o", place) for form, place in forms),
    ]


def told(*every: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Return exit codes, output and errors of commands that write to ``out`` alone; none ends in a traceback."""
    Path("out").mkdir(exist_ok=True)
    before = {path: path.lstat().st_mtime_ns for path in Path().rglob("*") if path.is_file() and path.parts[0] != "out"}
    found = []
    for words in every:
        done = CliRunner().invoke(cli.main, words)
        assert done.exit_code in (0, 1, 2, 4), words
        assert "Traceback" not in done.stderr, (words, done.stderr)
        if done.exit_code == 2:
            assert done.stderr.startswith("parbench: "), words
            assert done.stderr.count("\n") == 1, words
        found.append((done.exit_code, done.stdout, done.stderr))
    after = {path: path.lstat().st_mtime_ns for path in Path().rglob("*") if path.is_file() and path.parts[0] != "out"}
    assert after == before
    return found


def put(place: Raw, value: Any, *keys: str) -> None:
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


def test_a_line_that_is_no_record_costs_itself_and_is_told(run: Path) -> None:
    """Each is what once ended in a traceback, or in no end."""
    deep = "\ue000raw" + nested(5_000, "dict")
    changes: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (deep, ("details", "deep")),
        ("\ue000raw" + nested(500, "list"), ("environment", "deep")),
        (1.7e308, ("metrics", "time", "value")),
        (0, ("world", "size")),
        (2**62, ("world", "size")),
        (2**40, ("launch",)),
        ([-1.0], ("samples", "values")),
        (["note"] * 200_000, ("notes",)),
        ({str(number): number for number in range(20_000)}, ("case", "params")),
        ({str(number): {"value": 1.0} for number in range(20_000)}, ("metrics",)),
        ("yesterday", ("started",)),
        ("x" * 100_000, ("status",)),
        ("\ue000raw1e999", ("seconds",)),
    )
    for value, keys in changes:
        raw = json.loads(KEPT[0])
        put(raw, value, *keys)
        (run / "records.jsonl").write_bytes(dumped(raw) + b"\n" + b"".join(KEPT[1:]))
        [(code, out, _)] = told(("show", "--all", str(run)))
        assert code == 4, "its case counts as not measured"
        assert "1 line of records.jsonl cannot be read and do" in " ".join(out.split()), keys
        assert len(out) < 100_000
        assert "pingpong" in out, "the others are shown"
    [(code, _, err)] = told(("compare", str(run), str(STEPS)))
    assert code == 2, "what is compared has no gaps"
    assert "line 1 is no record" in err


def test_what_run_json_says_sizes_no_loop(run: Path) -> None:
    whole = (run / "run.json").read_text()
    changes: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (2**40, ("plan", "nproc")),
        (2**40, ("plan", "launches")),
        ("yesterday", ("started",)),
        ("../../evil", ("id",)),
        ("\ue000raw" + nested(5_000), ("environment", "deep")),
    )
    for value, keys in changes:
        raw = json.loads(whole)
        put(raw, value, *keys)
        (run / "run.json").write_bytes(dumped(raw))
        for words, (code, _, err) in zip(commands(run), told(*commands(run)), strict=True):
            assert code == (4 if words[0] == "report" else 2), (keys, words)
            assert not err or "run.json is not what parbench wrote: " in err


def test_a_fact_of_the_environment_that_is_no_number_is_not_counted_with(run: Path) -> None:
    raw = json.loads((run / "run.json").read_text())
    for cores in ("many", -3, 2**70, [2]):
        put(raw, cores, "environment", "process", "cores")
        (run / "run.json").write_bytes(dumped(raw))
        [(code, shown, err)] = told(("show", str(run)))
        assert (code in (0, 1, 4), "Look at first" in shown, err) == (True, True, ""), cores


def test_a_parameter_of_another_type_or_none_is_not_counted_with(run: Path) -> None:
    kinds, lines = ("params", "defaults"), [json.loads(line) for line in LINES]
    for one in lines[:4]:
        one["case"] |= {"name": "p2p.matrix", "params": {**one["case"]["params"], "source": 0, "target": 1}}
    names = sorted({name for one in lines for kind in kinds for name in one["case"].get(kind, {})})
    assert {"microbatch", "size_bytes", "source"} <= set(names)
    for name in names:
        for given in ("nan", None):
            spoilt = json.loads(dumped(lines))
            for one in spoilt:
                for params in (one["case"].get(kind, {}) for kind in kinds):
                    if params.pop(name, None) is not None and given is not None:
                        params[name] = given
            (run / "records.jsonl").write_bytes(b"".join(dumped(one) + b"\n" for one in spoilt))
            told(("show", "--all", str(run)), ("plan", "--validate", str(run)))


def test_numbers_that_nobody_measured_are_shown_and_break_nothing(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    info["launches"] = [{"launch": 0, "seconds": 0.0}]
    (run / "run.json").write_bytes(dumped(info))
    words = (("report", str(run), "-o", "out/one.html"), ("report", str(STEPS), str(run), "-o", "out/both.html"))
    for field, number in product(("value", "low"), (0.0, -1e-3)):
        spoilt = [json.loads(line) for line in LINES]
        for one in spoilt[::2]:
            for name, metric in one["metrics"].items():
                if name != "time" or field == "low":  # a time below zero is no record
                    metric[field] = number
        (run / "records.jsonl").write_bytes(b"".join(dumped(one) + b"\n" for one in spoilt))
        [one, both, _] = told(*words, ("compare", str(STEPS), str(run), "--floor", "0%"))
        assert (one[0], both[0]) == (0, 0), (field, number)


def test_no_id_of_a_case_leads_outside(run: Path) -> None:
    [trace] = (run / "traces").glob("*.gz")
    home = run.parents[2] / "outside"
    for name in ("../../outside/evil", f"{home}/evil", "", "\x00"):
        lines = [json.loads(line) for line in KEPT]
        plan = json.loads((STEPS / "run.json").read_text())
        for number, one in enumerate(lines):
            one["case"]["id"] = f"{name}{number}" if name else name
        plan["plan"]["cases"] = [one["case"] for one in lines]
        (run / "run.json").write_bytes(dumped(plan))
        (run / "records.jsonl").write_bytes(b"".join(dumped(one) + b"\n" for one in lines))
        [record] = [one for one in read_records(run / "records.jsonl") if one.case.name == "workload.ddp"]
        trace = trace.rename(run / trace_name(record))
        shutil.rmtree("out", ignore_errors=True)
        codes = [code for code, *_ in told(*commands(run))]
        assert codes == [0, 0, 0, 0, 0, 0] or not name.strip("\x00"), codes
        assert list(Path("out").glob("*.json")), "the timeline is exported, by a name of ours"
        assert not home.exists()
        assert not list(Path().rglob("*evil*"))


def test_a_damaged_timeline_or_prediction_costs_itself(run: Path) -> None:
    [trace] = (run / "traces").glob("*.gz")
    deep = gzip.compress(nested(100_000).encode())
    contents = [deep, bomb(*BOMBS[0]), b"", b"text", gzip.compress(b"{}"), trace.read_bytes()[:-20]]
    for content in contents:
        trace.write_bytes(content)
        every = commands(run)
        assert [code for code, *_ in told(every[0], every[3])] in ([0, 0], [0, 2])
    for content in (nested(5_000).encode(), b"{}", b"\xff", b'{"schema": 99}'):
        (run / "plan.json").write_bytes(content)
        [(code, _, _)] = told(("report", str(run), "-o", "out/report.html"))
        assert code == 0
        assert "plan.json" in Path("out/report.html").read_text()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("kind", [_pipe, _zero, Path.mkdir, _sparse])
def test_what_is_no_regular_file_or_never_ends_is_not_waited_for(run: Path, kind: Callable[[Path], object]) -> None:
    [trace] = (run / "traces").glob("*.gz")
    for name in ("run.json", "records.jsonl", "plan.json", str(trace.relative_to(run))):
        file, before = run / name, None
        if file.exists():
            before = file.read_bytes()
            file.unlink()
        kind(file)
        every = commands(run) if name != "plan.json" else commands(run)[:1]
        assert {code for code, *_ in told(*every)} <= {0, 2, 4}
        file.rmdir() if file.is_dir() else file.unlink()
        if before is not None:
            file.write_bytes(before)


def test_steps_that_no_planner_knows_are_not_predicted(run: Path) -> None:
    raw = json.loads(KEPT[-1])
    raw["case"]["params"]["shape"] = "unheard"
    (run / "records.jsonl").write_bytes(b"".join([*LINES[:6], dumped(raw) + b"\n"]))
    done = CliRunner().invoke(cli.main, ("plan", "--validate", str(run)))
    assert "Traceback" not in done.stderr
    assert done.exit_code in (0, 2)


def test_a_trace_whose_groups_are_no_ranks_is_explained_without_them(tmp_path: Path) -> None:
    file = RankFile(0, 2)
    file.step(0, 0.0, 900.0)
    file.event("cpu_op", "aten::mm", 10.0, 400.0)
    raw = json.loads(file.text())
    raw["distributedInfo"]["pg_config"] = [{"ranks": [[0], [1]]}, {"ranks": "01"}, 7]
    trace = tmp_path / "rank0.json"
    trace.write_text(json.dumps(raw))
    done = CliRunner().invoke(cli.main, ("explain", str(trace)))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.exit_code == 0
