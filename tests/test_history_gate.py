"""The gate: slower since when, what was meant, what is new, missing or broken, and how sure among many series."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_fixtures import CASE, OTHER, launches
from history_fixtures import entry, fill, nightly
from reports_fixtures import ENVIRONMENT, WORLD, bad, collective

from bench.errors import UserError
from reports.comparing.changepoints import StepRule
from reports.comparing.compare import Word
from reports.comparing.history import History, open_history
from reports.comparing.history_gate import MISSED_RUNS, Check, Finding, check, newest
from reports.comparing.noise_floor import Floor

RULE = StepRule()
STEP = [1.0] * 12 + [1.1] * 4


def checked(tmp_path: Path, factors: Iterable[float], *, rule: StepRule = RULE, **more: Any) -> Check:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        fill(history, tmp_path, factors, **more)
        return check(history, newest(history, "main"), rule)


def again(tmp_path: Path, rule: StepRule = RULE) -> Check:
    with open_history(tmp_path / "h.sqlite") as history:
        return check(history, newest(history, "main"), rule)


def of(found: Check, case: object = CASE) -> Finding:
    [one] = [one for one in found.findings if one.case == case]
    return one


def add(tmp_path: Path, i: int, **more: Any) -> None:
    with open_history(tmp_path / "h.sqlite") as history:
        history.add(entry(tmp_path, i, **more))


def test_nothing_changed(tmp_path: Path) -> None:
    found = checked(tmp_path, [1.0] * 12)
    assert found.counts == {"SAME": 2}
    assert (found.code(), found.code(fail_on_unknown=True)) == (0, 0)


def test_a_step_is_slower_since_its_first_run(tmp_path: Path) -> None:
    found = checked(tmp_path, STEP)
    one = of(found)
    assert one.word == "SLOWER"
    assert one.since is not None
    assert one.since.id == "run-012"
    assert one.shift is not None
    assert one.shift.change == pytest.approx(0.1, abs=0.01)
    assert found.code() == 1


def test_a_step_down_is_faster_and_fine(tmp_path: Path) -> None:
    found = checked(tmp_path, [1.0] * 12 + [0.8] * 4)
    assert found.counts == {"FASTER": 2}
    assert found.code() == 0


def test_two_runs_are_no_level(tmp_path: Path) -> None:
    assert checked(tmp_path, [1.0] * 12 + [1.1] * 2).counts == {"SAME": 2}


def test_the_floor_and_the_window_are_the_rules(tmp_path: Path) -> None:
    assert checked(tmp_path, STEP, rule=StepRule(floor=0.15)).counts == {"SAME": 2}
    assert len(of(again(tmp_path, StepRule(window=9))).times) == 9


def test_only_the_branch_and_what_came_before_count(tmp_path: Path) -> None:
    found = checked(tmp_path, [1.0] * 12)
    with open_history(tmp_path / "h.sqlite") as history:
        fill(history, tmp_path, [2.0] * 6, first=12, branch="topic")
        fill(history, tmp_path, [1.5] * 6, first=18)
        assert check(history, history.line("run-011"), RULE) == found
        assert len(of(check(history, newest(history, "main"), RULE)).times) == 18


def test_too_few_runs_are_told_with_their_number(tmp_path: Path) -> None:
    found = checked(tmp_path, [1.0] * 7)
    assert found.counts == {"INSUFFICIENT": 2}
    assert "7 of the 8 runs" in of(found).reason
    assert (found.code(), found.code(fail_on_unknown=True)) == (0, 3)


def test_another_version_begins_a_series_and_says_so(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 12)
    newer = {**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "version": "2.14.0"}}  # type: ignore[dict-item]
    add(tmp_path, 12, factor=1.5, environment=newer)
    one = of(again(tmp_path))
    assert one.word == "INSUFFICIENT"
    assert one.reason.endswith("a new series: torch.version: 2.13.0 -> 2.14.0")


def test_what_may_explain_a_step_stands_beside_it(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 12)
    host = {**ENVIRONMENT, "host": {**ENVIRONMENT["host"], "kernel": "6.99"}}  # type: ignore[dict-item]
    with open_history(tmp_path / "h.sqlite") as history:
        fill(history, tmp_path, [1.1] * 4, first=12, environment=host, commit="abc")
    one = of(again(tmp_path))
    assert one.word == "SLOWER"
    assert one.differs == ("commit: - -> abc", "host.kernel: - -> 6.99")


def test_an_annotated_change_is_a_new_beginning(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 12 + [1.1] * 9)
    with open_history(tmp_path / "h.sqlite") as history:
        history.annotate("run-012", "*all_reduce*", "meant")
    found = again(tmp_path)
    assert of(found).word == "SAME"
    assert len(of(found).times) == 9
    assert of(found, OTHER).word == "SLOWER", "it fits the other glob alone"


def test_an_annotation_of_another_branch_or_a_later_run_means_nothing(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 12)
    with open_history(tmp_path / "h.sqlite") as history:
        history.add(entry(tmp_path, 12, branch="topic"))
        fill(history, tmp_path, [1.1] * 4, first=13)
        history.annotate("run-012", "*", "elsewhere")
        assert of(check(history, newest(history, "main"), RULE)).word == "SLOWER"
        history.annotate("run-016", "*", "too late for run-015")
        assert of(check(history, history.line("run-015"), RULE)).word == "SLOWER"


@pytest.mark.parametrize(
    ("status", "word", "code"), [("wrong", "WRONG", 1), ("failed", "FAILED", 4), ("hang", "FAILED", 4)]
)
def test_what_went_wrong_tonight_is_told(tmp_path: Path, status: Any, word: str, code: int) -> None:
    checked(tmp_path, [1.0] * 12)
    add(tmp_path, 12, records=[*launches(OTHER), bad(CASE, 0, status, "rank 1 said so")])
    found = again(tmp_path)
    assert (of(found).word, of(found).reason) == (word, "rank 1 said so")
    assert found.code() == code


def test_a_case_that_vanished_is_missing(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 12)
    add(tmp_path, 12, records=nightly(12, cases=[OTHER]))
    found = again(tmp_path)
    assert of(found).word == "MISSING"
    assert found.code() == 4


def test_a_vanished_case_is_missing_while_one_of_the_last_three_runs_has_it(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 3)
    for i in range(3, 3 + MISSED_RUNS):
        add(tmp_path, i, records=nightly(i, cases=[OTHER]))
        found = again(tmp_path)
        assert (of(found).word, found.code()) == ("MISSING", 4)
    assert of(found).reason == "one of the 3 runs before that share a case with this one has it, and this one has not"
    add(tmp_path, 9, records=nightly(9, cases=[OTHER]))
    assert again(tmp_path).counts == {"INSUFFICIENT": 1}, "seven nights of one case"


def of_two(tmp_path: Path, kinds: Sequence[Sequence[Any]]) -> list[dict[Word, int]]:
    """Return the counts of verdicts, night by night, of two kinds of runs in turns."""
    counts = []
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for i in range(8):
            history.add(entry(tmp_path, i, records=kinds[i % 2]))
            counts.append(dict(check(history, newest(history, "main"), RULE).counts))
    return counts


def test_nights_of_two_worlds_do_not_miss_each_others_cases(tmp_path: Path) -> None:
    pair = msgspec.structs.replace(WORLD, size=2)
    both = [nightly(0), [*launches(CASE, world=pair), *launches(OTHER, world=pair)]]
    assert of_two(tmp_path, both) == [{"INSUFFICIENT": 2}] * 8
    add(tmp_path, 8, records=nightly(8, cases=[OTHER]))
    found = again(tmp_path)
    assert (of(found).word, of(found).world.size, len(found.findings)) == ("MISSING", 4, 2), "on its own world it is"


def test_nights_of_two_selections_do_not_miss_each_others_cases(tmp_path: Path) -> None:
    assert of_two(tmp_path, [nightly(0, cases=[CASE]), nightly(1, cases=[OTHER])]) == [{"INSUFFICIENT": 1}] * 8


def test_a_first_night_on_another_world_says_so(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 3)
    add(tmp_path, 3, records=launches(CASE, world=msgspec.structs.replace(WORLD, size=2)))
    found = again(tmp_path)
    assert found.counts == {"INSUFFICIENT": 1}
    assert of(found).reason.endswith("a new series: another world")


def test_a_night_without_any_case_misses_all(tmp_path: Path) -> None:
    checked(tmp_path, [1.0] * 3)
    add(tmp_path, 3, records=[])
    found = again(tmp_path)
    assert (found.counts, found.code()) == ({"MISSING": 2}, 4)


def many(i: int, moved: float, count: int) -> list[Any]:
    cases = [collective(name, 1024) for name in [f"op{k}" for k in range(count)]]
    return [
        r
        for k, case in enumerate(cases)
        for r in launches(case, (moved if k == 0 else 1.0) * (1 + 0.04 * _jitter(i, k)))
    ]


def _jitter(i: int, k: int) -> float:
    return ((i * 7919 + k * 104729 + i * i * 31) % 997) / 997 - 0.5


def test_what_is_sure_alone_may_not_be_among_many(tmp_path: Path) -> None:
    def words(folder: str, count: int) -> Sequence[str]:
        with open_history(tmp_path / folder / "h.sqlite", create=True) as history:
            for i in range(9):
                records = many(i, 1.05 if i >= 6 else 1.0, count)
                history.add(entry(tmp_path / folder, i, records=records))
            found = check(history, newest(history, "main"), RULE)
        return [one.word for one in found.findings]

    assert words("one", 1) == ["SLOWER"]
    crowd = words("crowd", 60)
    assert crowd[0] == "AMBIGUOUS"
    assert set(crowd[1:]) == {"SAME"}


def test_a_branch_without_runs_is_named(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        assert_refused(history, "it has no run at all")
        fill(history, tmp_path, [1.0])
        assert_refused(history, "it has main")


def assert_refused(history: History, told: str) -> None:
    with pytest.raises(UserError, match=f"no run of branch 'topic': {told}"):
        newest(history, "topic")


def test_a_measured_floor_is_the_series_own(tmp_path: Path) -> None:
    assert of(checked(tmp_path, STEP)).measured is None
    floor = Floor(series="", host="", measured="2026-01-02T00:00:00Z", launches=20, noise=0.1, floor=0.15)
    with open_history(tmp_path / "h.sqlite") as history:
        names = {one.case.id: one.fingerprint for one in history.series().values()}
        found = check(history, newest(history, "main"), RULE, {names[CASE.id]: floor})
        low = check(history, newest(history, "main"), StepRule(floor=0.2), {names[CASE.id]: floor})
    assert (of(found).word, of(found).measured) == ("SAME", floor)
    assert (of(found, OTHER).word, of(found, OTHER).measured) == ("SLOWER", None)
    assert of(low, OTHER).word == "SAME", "the rule's floor stays where it is more"
