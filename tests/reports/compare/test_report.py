"""`parbench compare`: its exit codes, and a comparison as columns, table, Markdown and JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.reports.commands import compare
from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.environment import collect_points
from parbench.reports.compare.rendering import render, render_markdown
from parbench.reports.compare.report import build_report
from parbench.reports.compare.thresholds import save_thresholds
from parbench.reports.history.runs import find_run
from tests.support.reports.compare_fixtures import (
    make_repetitions,
    make_threshold,
    run_from_records,
)
from tests.support.reports.nodes_fixtures import EMULATION
from tests.support.reports.reports_fixtures import collective_case, write_run

VERDICTS = ["WRONG", "SLOWER", "MISSING", "UNDECIDED", "NEW", "FASTER", "NO CHANGE"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder without `runs/thresholds.json` and `runs/history.sqlite`."""
    monkeypatch.delenv("PARBENCH_MIN_EFFECT", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def write(folder: Path, factor: float = 1.0, *, numpy: str = "2.4.6", **fields: Any) -> str:
    records = make_repetitions(factor=factor, **fields)
    return str(write_run(folder, run_from_records(records, {"versions": {"numpy": numpy}})))


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path)


@pytest.fixture
def slower(tmp_path: Path) -> str:
    return write(tmp_path, 1.2)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(compare, list(args))


def test_compare_draws_effects(base: str, slower: str) -> None:
    assert invoke(base, slower, "--figure", "effects.svg").exit_code == 1
    assert "SLOWER" in Path("effects.svg").read_text()
    assert invoke(base, slower, "--figure", "effects.gif").exit_code == 2


@pytest.mark.parametrize(
    ("new", "options", "code", "verdict"),
    [
        ({}, "", 0, "1 NO CHANGE"),
        ({"factor": 1.2}, "", 1, "1 SLOWER"),
        ({"factor": 1.03}, "--fail-on-undecided", 3, "1 UNDECIDED"),
        ({"factor": 1.2}, "--min-effect 30%", 0, "1 NO CHANGE"),
        ({"factor": 1.2, "count": 4}, "", 4, "1 NOT ENOUGH DATA"),
        ({"numpy": "2.5.0"}, "", 4, "versions.numpy: 2.4.6 -> 2.5.0"),
        ({"numpy": "2.5.0", "factor": 1.2}, "--across versions.numpy", 1, "1 SLOWER"),
    ],
)
def test_compare_exit_code(
    new: dict[str, Any], options: str, code: int, verdict: str, base: str, tmp_path: Path
) -> None:
    result = invoke(base, write(tmp_path, **new), *options.split())
    assert result.exit_code == code
    assert verdict in result.output


def test_compare_names_the_emulated_side(base: str, tmp_path: Path) -> None:
    text = invoke(base, write(tmp_path, emulation=EMULATION)).output
    assert f"NEW is emulated: {EMULATION}" in text
    assert "BASE is" not in text


def test_compare_uses_a_measured_threshold(base: str, slower: str, tmp_path: Path) -> None:
    file = str(tmp_path / "thresholds.json")
    [point] = collect_points(find_run(slower))
    save_thresholds(Path(file), {point.series.fingerprint: make_threshold(0.3)})
    result = invoke(base, slower, "--min-effect", file)
    assert result.exit_code == 0
    assert "at most 30.0 %" in result.output


@pytest.mark.parametrize(
    ("form", "start"),
    [("tables", "Verdict: "), ("markdown", "## "), ("json", "{"), ("junit", "<?xml")],
)
def test_compare_writes_each_format(form: str, start: str, base: str, slower: str) -> None:
    result = invoke(base, slower, "--format", form, "-o", "output")
    assert (result.exit_code, result.output) == (1, "")
    text = Path("output").read_text()
    assert text.startswith(start)
    assert "SLOWER" in text


def test_compare_refuses_runs_that_do_not_compare(base: str, tmp_path: Path) -> None:
    other_size = make_repetitions(collective_case(size_bytes=2048))
    other_case = str(write_run(tmp_path, run_from_records(other_size)))
    for new, problem in (
        (str(tmp_path / "empty"), "run.json"),
        (
            other_case,
            "share no series: collective.all_reduce: size_bytes=1024 in BASE, 2048 in NEW",
        ),
        (f"{base}/../{Path(base).name}", "the same run"),
        ("absent", "absent"),
    ):
        result = CliRunner().invoke(cli.main, ["compare", base, new])
        assert result.exit_code == 2
        assert problem in str(result.output)


def test_across_without_a_difference_is_reported(base: str, slower: str) -> None:
    text = invoke(base, slower, "--across", "count.*").output
    assert "--across count.* matches no difference. The differences are: none" in text


def test_markdown_is_escaped_and_worst_first(mixed: RunComparison) -> None:
    text = render_markdown(build_report(mixed))
    assert "1 WRONG, 1 SLOWER, 1 MISSING" in text.splitlines()[0]
    series = text.partition("### Times")[2].partition("| --- |")[2].partition("###")[0]
    assert re.findall(rf"\| ({'|'.join(VERDICTS)}) \|", series) == VERDICTS
    assert "b\\|c" in text
    assert not re.search("<script>|\x1b", text)


def test_json_holds_every_number(mixed: RunComparison) -> None:
    data = json.loads(render(build_report(mixed, 1), "json"), parse_constant=pytest.fail)
    assert data["schema_version"] == 4
    assert data["verdicts"] == dict.fromkeys(VERDICTS, 1)
    series = data["series"][0]
    assert series["effect"]["change"] == pytest.approx(0.2)
    assert {"low", "high", "detectable", "p_value"} < series["effect"].keys()
    assert len(series["times"]["base"]) == 5
    [change] = data["environment"]
    assert change["path"] == "host.address"
    assert change["new"] == "b|c"
