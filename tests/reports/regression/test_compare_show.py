"""``parbench compare`` from its words to its exit code."""

import json
import re
from pathlib import Path
from shutil import copytree

import pytest
from click.testing import CliRunner, Result

from parbench.bench.text import UserError
from parbench.reports.commands import COMPARISONS, compare
from parbench.reports.history.runs import find_run
from parbench.reports.regression.ab import LOOKS
from parbench.reports.regression.compare_show import compare_runs
from parbench.reports.regression.noise_floor import (
    Floor,
    find_floor,
    fingerprints,
    keep_floors,
    parse_floor,
)
from tests.support.compare_fixtures import CASE, OTHER_CASE, make_repetitions, run_from_records
from tests.support.reports_fixtures import failed_record, ok_record, write_run


def folder(out: Path, factor: float = 1.0, count: int = 5, numpy: str = "2.4.6") -> str:
    environment = {"versions": {"numpy": numpy}}
    return str(
        write_run(out, run_from_records(make_repetitions(factor=factor, count=count), environment))
    )


def invoke(*words: str) -> Result:
    return CliRunner().invoke(compare, list(words))


def test_compare_exit_codes(
    tmp_path: Path,
) -> None:
    base, slower, few = folder(tmp_path), folder(tmp_path, 1.2), folder(tmp_path, 1.2, count=4)
    other = folder(tmp_path, 1.2, numpy="2.5.0")
    both, failed = (
        str(write_run(tmp_path, run_from_records([*make_repetitions(), *more])))
        for more in (make_repetitions(OTHER_CASE), [failed_record(OTHER_CASE, 0, "failed")])
    )
    for words, code, told in (
        ((base, folder(tmp_path)), 0, "Verdict: 1 SAME"),
        ((base, slower), 1, "Verdict: 1 SLOWER"),
        ((base, slower, "--floor", "30%"), 0, "SAME"),
        (
            (base, few),
            3,
            "The whole run: nothing could be compared: 1 INSUFFICIENT (too few launches to compare).",
        ),
        ((base, other), 3, "ENV-CHANGED"),
        ((base, other, "--across", "versions.numpy", "--fail-on-unknown"), 1, "SLOWER"),
        ((both, failed), 4, "FAILED"),
    ):
        result = invoke(*words)
        assert (result.exit_code, told in result.output) == (code, True), words


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the usual files in a folder that has none."""
    monkeypatch.delenv("PARBENCH_FLOOR", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def measured(file: Path, run: str, floor: float = 0.3) -> None:
    found = Floor(
        series="",
        host="node-a",
        measured="2026-01-02T03:04:05Z",
        launches=20,
        noise=0.1,
        floor=floor,
    )
    keep_floors(file, dict.fromkeys(fingerprints(find_run(run)).values(), found))


def test_compare_uses_a_measured_floor(tmp_path: Path) -> None:
    base, new = folder(tmp_path), folder(tmp_path, 1.2)
    file = tmp_path / "floor.json"
    measured(file, base)
    assert invoke(base, new).exit_code == 1
    found = invoke(base, new, "--floor", str(file))
    assert (found.exit_code, "Verdict: 1 SAME" in found.output) == (0, True)
    assert (
        "Measured on node-a: floor 30.0 %, measured here on 2026-01-02 with 20 launches."
        in found.output
    )
    assert "Measured on" not in invoke(base, new).output
    measured(Path("runs/floor.json"), base)
    assert invoke(base, new).exit_code == 0, "the usual file"
    assert invoke(base, new, "--floor", "3%").exit_code == 1, "a percentage stands alone"
    told = json.loads(invoke(base, new, "--format", "json").output)["families"][0]["series"][0]
    assert (told["effect"]["floor"], told["measured_floor"]["launches"]) == (pytest.approx(0.3), 20)


def test_compare_ignores_a_floor_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = folder(tmp_path), folder(tmp_path, 1.2)
    other = write_run(
        tmp_path,
        run_from_records(
            make_repetitions(), {"versions": {"numpy": "2.4.6"}, "torch": {"version": "2.14.0"}}
        ),
    )
    measured(tmp_path / "floor.json", str(other))
    assert invoke(base, new, "--floor", str(tmp_path / "floor.json")).exit_code == 1
    monkeypatch.setenv("PARBENCH_FLOOR", "30%")
    assert invoke(base, new).exit_code == 0


def test_compare_advises_more_repetitions(tmp_path: Path) -> None:
    base = folder(tmp_path)
    times = [ok_record(CASE, i, 1e-3 * value) for i, value in enumerate((0.9, 1.1, 1.2, 0.8, 1.0))]
    noisy = str(write_run(tmp_path, run_from_records(times, {"versions": {"numpy": "2.4.6"}})))
    advice = f"{LOOKS[0]} launches a side, interleaved by parbench ab, decide about half of what is AMBIGUOUS\n"
    assert advice in invoke(base, folder(tmp_path, 1.03)).stdout
    assert (
        f"at most {LOOKS[-1]}, which decide as much at a floor of 13 %\n"
        in invoke(base, noisy).stdout
    )
    without = invoke(base, noisy, "--floor", "0%").stdout
    assert ("Verdict: 1 AMBIGUOUS" in without, "parbench ab" in without) == (True, False)


def test_compare_formats_go_to_stdout_or_a_file(tmp_path: Path) -> None:
    base, new, target = folder(tmp_path), folder(tmp_path, 1.2), tmp_path / "out"
    starts = {"table": "BASE: ", "markdown": "## ", "json": "{", "junit": "<?xml"}
    assert set(starts) == set(COMPARISONS)
    for form, start in starts.items():
        printed = invoke(base, new, "--format", form)
        assert printed.output.startswith(start)
        assert "SLOWER" in printed.output
        assert "No room" not in printed.output, "a pipe is as wide as it must be"
        written = invoke(base, new, "--format", form, "-o", str(target))
        assert (written.exit_code, written.output) == (1, "")
        assert target.read_text() == printed.output
    few = folder(tmp_path, count=2)
    assert json.loads(invoke(base, few, "--format", "json").output)["exit_code"] == 3


def test_compare_refuses_what_is_not_comparable(tmp_path: Path) -> None:
    base, other = (
        folder(tmp_path),
        str(write_run(tmp_path, run_from_records(make_repetitions(OTHER_CASE)))),
    )
    for new, why in (
        (str(tmp_path / "here"), r"is no run: it holds no readable run\.json"),
        (other, r"the runs share no series: BASE .* has 1 measured case on 4 ranks"),
        (f"{base}/../{Path(base).name}", "are the same run"),
    ):
        with pytest.raises(UserError, match=why):
            compare_runs(base, new)
    assert isinstance(invoke(str(tmp_path / "absent"), base).exception, UserError)
    assert [invoke(*words).exit_code for words in ((), ("a",), ("a", "b", "--format", "html"))] == [
        2,
        2,
        2,
    ]


def test_compare_pools_a_folder_without_the_other_run(tmp_path: Path) -> None:
    for i in range(3):
        info = copytree(folder(tmp_path), tmp_path / "main" / str(i)) / "run.json"
        info.write_text(re.sub(r'"id": "[^"]*"', f'"id": "{i}"', info.read_text()))
    result = invoke(str(tmp_path / "main"), folder(tmp_path, 1.2))
    assert (result.exit_code, "15 launches" in result.output) == (1, True), result.output
    result = invoke(str(tmp_path / "main"), str(tmp_path / "main" / "2"))
    assert (result.exit_code, "10 launches" in result.output) == (0, True), result.output


def test_floor_is_a_percentage_or_a_file(tmp_path: Path) -> None:
    for text, floor in (("3%", 0.03), (" 0.5% ", 0.005), ("0%", 0.0), ("100%", 1.0)):
        assert parse_floor(text) == pytest.approx(floor)
    for text in ("3", "0.03", "-1%", "101%", "nan%", "few", "", "%", "3%%", "3%x"):
        with pytest.raises(UserError, match=r"--floor .* write a percentage from 0% to 100%"):
            parse_floor(text)
    assert find_floor(None) == (0.03, {})
    with pytest.raises(UserError, match=r"--floor 'absent\.json' is not understood"):
        find_floor("absent.json")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        find_floor(str(tmp_path))
