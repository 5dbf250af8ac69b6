"""The verdict against a history that does not keep the run: none, too few, as before, slower."""

from pathlib import Path

import pytest

from parbench.reports.analysis.verdicts import Verdict
from parbench.reports.history.baseline import baseline
from parbench.reports.history.database import open_history
from tests.support.history_fixtures import fill_history, write_history_run


def test_a_run_is_held_against_the_history_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "h.sqlite"
    monkeypatch.setenv("PARBENCH_HISTORY", str(file))

    tonight = {
        factor: write_history_run(tmp_path / f"x{factor}", 99, factor) for factor in (1.0, 2.0)
    }

    def of(factor: float) -> Verdict:
        return baseline(tonight[factor])

    assert (of(1.0).word, of(1.0).told) == ("NO BASELINE", "no history says what is usual here")
    with open_history(file, create=True) as history:
        fill_history(history, tmp_path, [1.0] * 5)
    assert of(1.0).told == "5 of the 8 runs that are needed"
    with open_history(file) as history:
        fill_history(history, tmp_path, [1.0] * 7, first=5)
    before = file.read_bytes()
    assert of(1.0) == Verdict(
        word="AS BEFORE", level="good", told="2 series are as in the 12 runs before"
    )
    twice = of(2.0)
    assert (twice.word, twice.level) == ("SLOWER", "doubtful")
    assert twice.told == "2 of 2 series are slower than in the 12 runs before"
    assert file.read_bytes() == before
    file.write_bytes(b"no history")
    assert of(1.0).word == "NO BASELINE", "a history that cannot be read fails no run"
