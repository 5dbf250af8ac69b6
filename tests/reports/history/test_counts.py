"""Counts in the history: kept with each run, held exactly from its second run on, since when, and what was meant."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from parbench import cli
from parbench.bench.results.metrics import values
from parbench.bench.results.records import Record
from parbench.reports.history.baseline import baseline
from parbench.reports.history.database import History, open_history
from parbench.reports.history.gate import Check, check, check_folder, newest
from parbench.reports.history.levels import StepRule
from parbench.reports.history.show import answer, render, render_json
from tests.support.history_fixtures import make_entry, write_history_run
from tests.support.reports_fixtures import ok_record, step_case, step_metrics

RULE = StepRule()
CASE = step_case("ddp")


def night(*calls: float) -> list[Record]:
    """Return the records of one night, a launch for each number of all_reduces; of none it kept no counts."""
    counts = [
        {"calls.dp": count, "calls.dp.all_reduce": count, "sent.dp.all_reduce": 8.0}
        for count in calls
    ]
    return [
        ok_record(CASE, launch, metrics={**step_metrics(0.02), **values(told)})
        for launch, told in enumerate(counts or [{}])
    ]


def filled(history: History, folder: Path, calls: Sequence[float | None], first: int = 0) -> None:
    for i, count in enumerate(calls, start=first):
        history.add(make_entry(folder, i, records=night(*([] if count is None else [count]))))


def told(found: Check) -> list[tuple[str, str]]:
    return [(change.told, since) for _, change, since in found.changes if change.fails]


def tonight(history: History) -> Check:
    return check(history, newest(history, "main"), RULE)


def changed(before: float, after: float) -> str:
    return f"all_reduce on dp: {before:g} -> {after:g} calls a step, as many bytes"


def test_a_change_is_found_from_the_second_run_on_and_stays_until_it_was_meant(
    tmp_path: Path,
) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for calls, expected in (
            ([2.0], None),
            ([2.0], []),
            ([5.0], [(changed(2, 5), "run-002")]),
            ([5.0], [(changed(2, 5), "run-002")]),
            ([7.0], [(changed(2, 7), "run-004")]),
            ([2.0], []),
            ([5.0], [(changed(2, 5), "run-006")]),
        ):
            filled(history, tmp_path, calls, first=len(history.runs()))
            found = tonight(history)
            assert (told(found) if found.counted else None) == expected, len(history.runs())
            assert found.code() == (1 if expected else 0)
        history.annotate("run-006", "*ddp*", "smaller buckets")
        assert told(tonight(history)) == []
        filled(history, tmp_path, [5.0, 2.0], first=7)
        assert told(tonight(history)) == [(changed(5, 2), "run-008")]


def test_runs_that_kept_no_counts_are_passed_over_and_nothing_is_said_of_theirs(
    tmp_path: Path,
) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        filled(history, tmp_path, [None, 2.0, None])
        found = tonight(history)
        assert (found.counted, found.code()) == ((), 0)
        assert "ounted" not in render(found)
        filled(history, tmp_path, [5.0], first=3)
        assert told(tonight(history)) == [(changed(2, 5), "run-003")]


def test_a_pull_request_is_held_against_the_branchs_newest_counts(tmp_path: Path) -> None:
    file, folder = (
        tmp_path / "h.sqlite",
        write_history_run(tmp_path / "new", 99, records=night(5.0)),
    )
    assert check_folder(file, folder, "main", RULE).code() == 0
    with open_history(file, create=True) as history:
        filled(history, tmp_path, [9.0, 2.0])
    before = file.read_bytes()
    found = check_folder(file, folder, "main", RULE)
    assert told(found) == [(changed(2, 5), "run-099")], (
        "not against what the branch itself has changed"
    )
    assert (
        answer(found)
        == f"FAIL: 1 CHANGED of 1 series, against the last 2 runs of main: ddp layers=4 {changed(2, 5)}"
    )
    same = check_folder(
        file, write_history_run(tmp_path / "same", 98, records=night(2.0)), "main", RULE
    )
    assert (
        answer(same)
        == "Not enough history: 2 of 8 runs of main; none of 2 counts in 1 series changed"
    )
    assert file.read_bytes() == before


def test_the_gate_tells_counts_first_in_every_form(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        filled(history, tmp_path, [2.0, 5.0])
        found = tonight(history)
    for text in (render(found), render(found, "markdown").replace("&gt;", ">")):
        assert text.index("CHANGED ") < text.index("INSUFFICIENT")
        assert changed(2, 5) in text
        assert "run-001" in text
        assert "parbench history annotate" in text
    whole = json.loads(render_json(found, 1))
    [change] = whole["counts"]["changes"]
    assert (change["told"], change["since"], whole["counts"]["held"]) == (
        changed(2, 5),
        "run-001",
        2,
    )
    assert whole["verdicts"]["CHANGED"] == 1


def test_launches_that_do_not_agree_are_kept_as_they_are(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(make_entry(tmp_path, 0, records=night(2.0, 3.0)))
        filled(history, tmp_path, [9.0], first=1)
        assert told(tonight(history)) == []
        [number] = history.series()
        [(_, facts), _] = history.counted(number, history.runs())
        assert facts["calls.dp.all_reduce"] == [2, 3]
        assert history.prune(1) == ("run-000",)
        assert len(history.counted(number, history.runs())) == 1


def test_the_commands_keep_and_hold_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARBENCH_HISTORY", str(tmp_path / "h.sqlite"))
    runs = [str(write_history_run(tmp_path, i, records=night(2.0))) for i in range(2)]
    assert CliRunner().invoke(cli.main, ["history", "add", *runs]).exit_code == 0
    new = write_history_run(tmp_path, 9, records=night(4.0))
    done = CliRunner().invoke(cli.main, ["history", "check", str(new)])
    assert (done.exit_code, changed(2, 4) in done.stdout) == (1, True)
    assert (baseline(new).word, baseline(new).told) == ("CHANGED", changed(2, 4))
