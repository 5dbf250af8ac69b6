"""parbench's own hot paths: right in every run of the tests, timed where ``--benchmark-json`` asks for their times.

Times are no part of these tests: without that option each path is taken once, and only its result counts. What compares
the times is tests/studies/hot_paths.py. It takes them with another commit's code too, so each imports what it needs
by itself: what that commit has otherwise is missing there, and the rest is compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hot_paths
import pytest
from compare_fixtures import launches, run_of
from reports_fixtures import collective, sample_run, write_run

from parbench.reports.regression.rule import Rule

Take = Callable[..., Any]
SIZES = [1024 * 2**i for i in range(20)]


@pytest.fixture
def take(request: pytest.FixtureRequest) -> Take:
    if request.config.getoption("benchmark_json", default=None):
        timed: Take = request.getfixturevalue("benchmark")
        return timed
    return lambda path, *words: path(*words)


def test_reading_a_thousand_records(take: Take, tmp_path: Path) -> None:
    from parbench.bench.results.runs import load_run

    cases = [collective(size_bytes=size, root=root) for size in SIZES for root in range(10)]
    path = write_run(tmp_path, run_of(record for case in cases for record in launches(case)))
    assert len(take(load_run, path).records) == 1000


def test_planning_the_usual_run(take: Take) -> None:
    from parbench.bench.machine.world_spec import WorldSpec
    from parbench.bench.plan.catalogue import DEFINITIONS
    from parbench.bench.plan.options import Options, make_plan

    plan = take(make_plan, Options(preset="node"), DEFINITIONS, WorldSpec(nproc=4, backend="gloo", device="cpu"))
    assert len(plan.cases) > 50


def test_fitting_a_curve(take: Take) -> None:
    from parbench.bench.results.fit import Point, fit

    points = [Point(size_bytes=size, seconds=20e-6 + size / 3e9 * (1 + size % 3 / 100)) for size in SIZES]
    found = take(fit, points)
    assert found.segments[-1].bytes_per_second == pytest.approx(3e9, rel=0.1)


def test_comparing_two_runs(take: Take) -> None:
    from parbench.reports.regression.compare import compare

    cases = [collective(name, size) for name in ("all_reduce", "broadcast", "all_gather") for size in SIZES]
    base, new = (run_of(record for case in cases for record in launches(case, f)) for f in (1.0, 1.2))
    assert take(compare, base, new, Rule()).counts == {"SLOWER": len(cases)}


def test_building_a_small_page(take: Take) -> None:
    from parbench.reports.render.page import render_page
    from parbench.reports.sections.one_run import report_of

    run = sample_run(launches=1)
    assert "</html>" in take(lambda: render_page(report_of(run)))


# --- what judges the times: tests/studies/hot_paths.py ---

NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.0)


def side(**factors: float) -> list[dict[str, float]]:
    return [{name: 1e-3 * factor * value for name, factor in factors.items()} for value in NOISE]


def test_slower_paths_are_told_from_those_that_are_not() -> None:
    found = hot_paths.lines(side(read=1.0, plan=1.0), side(read=1.2, plan=1.0), Rule())
    assert {line.name: line.word for line in found} == {"read": "SLOWER", "plan": "SAME"}
    assert found[0].effect is not None
    assert found[0].effect.change == pytest.approx(0.2)
    assert hot_paths.code(found) == 1
    assert hot_paths.code(hot_paths.lines(side(read=1.0), side(read=0.8), Rule())) == 0


def test_what_one_side_lacks_is_missing_and_alone_compares_nothing() -> None:
    found = hot_paths.lines(side(read=1.0), side(read=1.0, new=1.0), Rule())
    assert {line.name: line.word for line in found} == {"read": "SAME", "new": "MISSING"}
    assert hot_paths.code(found) == 0
    assert hot_paths.code(hot_paths.lines(side(old=1.0), side(new=1.0), Rule())) == 2


def test_too_few_launches_are_no_pass() -> None:
    found = hot_paths.lines(side(read=1.0)[:4], side(read=1.2)[:4], Rule())
    assert [line.word for line in found] == ["INSUFFICIENT"]
    assert hot_paths.code(found) == 2


def test_a_tree_in_which_nothing_can_be_timed_is_said_and_has_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise RuntimeError('an older tree')")
    assert hot_paths.launch(tmp_path) == {}
    assert "an older tree" in capsys.readouterr().err


def test_both_trees_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def launch(tree: Path) -> dict[str, float]:
        seen.append(tree)
        return {"read": float(len(seen))}

    monkeypatch.setattr(hot_paths, "launch", launch)
    base, new = hot_paths.in_turns(Path("base"), 2)
    assert [tree == hot_paths.TREE for tree in seen] == [False, True, True, False]
    assert ([one["read"] for one in base], [one["read"] for one in new]) == ([1.0, 4.0], [2.0, 3.0])


def test_the_medians_are_those_of_pytest_benchmark() -> None:
    whole = {"benchmarks": [{"name": "a", "stats": {"median": 0.5, "mean": 0.7}}], "version": "5"}
    assert hot_paths.medians(whole) == {"a": 0.5}
