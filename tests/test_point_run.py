"""One point's child: its words, its end, and what its run folder says came of it."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import case, plan, wait_until
from reports_fixtures import bad, ok
from standin import standin
from sweeps import make_folder, make_sweep, point

from bench.messages import LEFT_OUT
from bench.records import RankState, Record
from bench.runs import RunInfo, create_run, load_run, open_writer, write_info
from slurm.ledger import State
from slurm.point_run import (
    Attempt,
    Child,
    begun_run,
    broken_records,
    forget_broken,
    measured_count,
    missing_share,
    outcome_of,
    parbench_run,
    relative,
    silent_hosts,
)

CASES = tuple(case(number) for number in range(3))
P = point()


def attempt(tmp_path: Path, **more: Any) -> Attempt:
    sweep = make_sweep([P])
    given = {"folder": make_folder(tmp_path, sweep), "sweep": sweep, "point": P, "nodes": ("n1", "n3"), "run": None}
    return Attempt(**{**given, **more})


def written(out: Path, *records: Record, hosts: list[str] | None = None) -> Path:
    path, info = create_run(out, plan(CASES), "0")
    write_info(path, RunInfo(**{**_fields(info), "environment": {"hosts": hosts}}))
    with open_writer(path) as writer:
        for record in records:
            writer.write(record)
    return path


def _fields(info: RunInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_the_words_of_a_fresh_run(tmp_path: Path) -> None:
    asked = attempt(tmp_path)
    assert parbench_run(asked) == [
        *(sys.executable, "-P", "-m", "parbench", "run", "--json", "--nodelist", "n1,n3", "--launcher", "srun"),
        *("--nodes", "2", "--ntasks-per-node", "1", "--placement", "block"),
        *("--plan", str(asked.folder / "points" / f"{P.id}.toml"), "--out", str(asked.folder / "runs" / P.id)),
    ]


def test_the_words_with_a_link_and_without_known_nodes(tmp_path: Path) -> None:
    words = parbench_run(attempt(tmp_path, sweep=make_sweep([P], link="400Gbit"), nodes=()))
    assert words[-2:] == ["--link", "400Gbit"]
    assert "--nodelist" not in words


def test_the_words_that_go_on_with_a_run(tmp_path: Path) -> None:
    words = parbench_run(attempt(tmp_path, run=tmp_path / "r"))
    assert words[6:] == ["--nodelist", "n1,n3", "--resume", str(tmp_path / "r")]


def test_parbench_takes_these_words(tmp_path: Path) -> None:
    """The real command line reads them: what is left to refuse is that there is no allocation here."""
    child = Child(attempt(tmp_path), parbench_run)
    child.end(30.0)
    assert child.code == 2
    assert "srun" in child.last_words()
    assert child.last_words().startswith("parbench: ")


def test_a_child_measures_and_its_run_is_found(tmp_path: Path) -> None:
    asked = attempt(tmp_path)
    child = Child(asked, standin(cases=3))
    child.end(30.0)
    run = begun_run(asked.folder, P, ())
    assert run is not None
    found = outcome_of(run, child.code, child.last_words())
    assert (found.state, found.reason, found.measured, found.planned) == ("done", "", 3, 3)
    assert relative(asked.folder, run) == f"runs/{P.id}/{run.name}"


def test_a_child_gets_the_points_variables_and_its_words_are_kept(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['A'], os.environ['PARBENCH_SRUN_OPTIONS'].split(), file=sys.stderr)"
    options = ("--container-image=a", "--mem=0")
    asked = attempt(tmp_path, point=point(variables={"A": "7"}), sweep=make_sweep([P], srun_options=options))
    child = Child(asked, lambda _: [sys.executable, "-c", script])
    child.end(30.0)
    assert child.last_words() == "7 ['--container-image=a', '--mem=0']"


@pytest.mark.measures
def test_a_child_told_to_stop_keeps_what_is_done(tmp_path: Path) -> None:
    asked = attempt(tmp_path)
    child = Child(asked, standin(cases=200, each=0.05))
    wait_until(lambda: measured_count(begun_run(asked.folder, P, ())) >= 2)
    child.terminate()
    began = time.monotonic()
    child.end(5.0)
    assert time.monotonic() - began < 2.0
    run = begun_run(asked.folder, P, ())
    found = outcome_of(run, child.code, child.last_words())
    assert found.state == "interrupted"
    assert 2 <= found.measured < 200
    assert found.reason.startswith(f"{200 - found.measured} of 200 measurements are missing, the run ended with exit")
    assert missing_share(run) == pytest.approx((200 - found.measured) / 200)


def test_a_stubborn_child_is_killed(tmp_path: Path) -> None:
    asked = attempt(tmp_path)
    child = Child(asked, standin(cases=200, each=0.05, end="stubborn"))
    wait_until(lambda: measured_count(begun_run(asked.folder, P, ())) >= 1)
    child.terminate()
    child.end(0.3)
    assert child.code == -9
    assert "SIGKILL" in outcome_of(begun_run(asked.folder, P, ()), child.code, "").reason


def test_a_child_hears_that_its_parent_was_killed(tmp_path: Path) -> None:
    """Slurm kills the ranks of a job next; a run that lived on would take their death for a failure of its case."""
    asked = attempt(tmp_path)
    parent = os.fork()
    if parent == 0:
        try:
            Child(asked, standin(cases=1000, each=0.05))
            time.sleep(60)
        finally:
            os._exit(1)
    wait_until(lambda: measured_count(begun_run(asked.folder, P, ())) >= 1)
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    time.sleep(0.5)
    run = begun_run(asked.folder, P, ())
    before = measured_count(run)
    time.sleep(0.3)
    assert measured_count(run) == before


def test_no_run_and_bad_input_is_the_sentence_it_ended_with() -> None:
    found = outcome_of(None, 2, "parbench: --nodes 9: job 7 has 4")
    assert (found.state, found.reason) == ("failed", "parbench: --nodes 9: job 7 has 4")


def test_no_run_and_any_other_end_may_be_tried_again() -> None:
    assert outcome_of(None, -9, "").state == "interrupted"
    assert outcome_of(None, -9, "").reason == "the run ended with SIGKILL before it began"
    assert outcome_of(None, 1, "Traceback").state == "interrupted"


@pytest.mark.parametrize(
    ("records", "state", "reason"),
    [
        ([ok(CASES[0]), ok(CASES[1]), ok(CASES[2])], "done", ""),
        ([ok(CASES[0]), ok(CASES[1]), bad(CASES[2], 0, "skipped", LEFT_OUT)], "done", ""),
        ([ok(CASES[0]), bad(CASES[1], 0, "hang", "late"), bad(CASES[2], 0, "wrong", "3")], "failed", "wrong: {2}: 3"),
        ([ok(CASES[0]), bad(CASES[1], reason="a"), bad(CASES[2], reason="b")], "failed", "failed: {1}: a (and 1 more)"),
        ([ok(CASES[0])], "interrupted", "2 of 3 measurements are missing, the run ended with exit code 4: words"),
        ([], "interrupted", "3 of 3 measurements are missing, the run ended with exit code 4: words"),
        (
            [bad(CASES[0])],
            "interrupted",
            "failed: {0}: it broke; 2 of 3 measurements are missing, the run ended with exit code 4: words",
        ),
    ],
    ids=["ok", "left-out", "wrong-first", "two-failed", "missing", "nothing", "bad-and-missing"],
)
def test_the_verdict_of_records(tmp_path: Path, records: list[Record], state: State, reason: str) -> None:
    found = outcome_of(written(tmp_path, *records), 4, "words")
    assert (found.state, found.reason) == (state, reason.format(*(case.label for case in CASES)))
    assert found.measured == len(records)


def test_the_runs_own_name_is_no_reason(tmp_path: Path) -> None:
    """With ``--json`` the last line on standard error is where the run is."""
    run = written(tmp_path)
    assert outcome_of(run, 4, str(run)).reason == "3 of 3 measurements are missing, the run ended with exit code 4"


def test_what_an_earlier_attempt_said_is_not_taken_for_this_ones_words(tmp_path: Path) -> None:
    asked = attempt(tmp_path)
    for script, words in (("import sys; print('parbench: old', file=sys.stderr)", "parbench: old"), ("pass", "")):
        child = Child(asked, lambda _, script=script: [sys.executable, "-c", script])  # type: ignore[misc]
        child.end(30.0)
        assert child.last_words() == words


def test_missing_records_after_bad_input_are_not_tried_for_ever(tmp_path: Path) -> None:
    assert outcome_of(written(tmp_path), 2, "parbench: the disk is full").state == "failed"


def test_hosts_are_those_of_the_ranks_each_once(tmp_path: Path) -> None:
    assert outcome_of(written(tmp_path, hosts=["n1", "n1", "n3"]), 0, "").hosts == ("n1", "n3")
    assert outcome_of(written(tmp_path / "other"), 0, "").hosts == ()


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    run = written(tmp_path)
    (run / "run.json").write_text("{}")
    found = outcome_of(run, 0, "")
    assert found.state == "failed"
    assert "run.json is not what parbench wrote" in found.reason


def test_the_newest_whole_run_is_gone_on_with_and_no_spoilt_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep([P]))
    assert begun_run(folder, P, ()) is None
    for name in ("20260101T000000Z-a", "20260102T000000Z-a", "20260103T000000Z-a"):
        (folder / "runs" / P.id / name).mkdir(parents=True)
        (folder / "runs" / P.id / name / "records.jsonl").touch()
        if "03T" not in name:
            (folder / "runs" / P.id / name / "run.json").touch()
    newest = begun_run(folder, P, ())
    assert newest is not None
    assert newest.name == "20260102T000000Z-a"
    older = begun_run(folder, P, {relative(folder, newest)})
    assert older is not None
    assert older.name == "20260101T000000Z-a"


def test_shares_and_counts_of_what_is_not_begun() -> None:
    assert missing_share(None) == 1.0
    assert measured_count(None) == 0
    assert broken_records(None) == ()


def test_broken_records_are_hangs_and_failures_alone(tmp_path: Path) -> None:
    run = written(tmp_path, ok(CASES[0]), bad(CASES[1], 0, "hang"), bad(CASES[2], 0, "wrong"))
    assert [record.case.id for record in broken_records(run)] == [CASES[1].id]


def test_what_the_jobs_end_broke_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    early, late = "2026-01-01T00:00:01.000Z", "2026-01-01T00:00:09.000Z"
    run = written(tmp_path, bad(CASES[0], started=early), ok(CASES[1], started=late), bad(CASES[2], started=late))
    forget_broken(run, "2026-01-01T00:00:05.000Z")
    assert [record.case.id for record in load_run(run).records] == [CASES[0].id, CASES[1].id]
    assert missing_share(run) == pytest.approx(1 / 3)


def test_silent_hosts_of_several_hangs_are_each_named_once() -> None:
    def rank(number: int, host: str, state: str) -> RankState:
        return RankState(rank=number, host=host, pid=1, state=state)

    one = bad(CASES[0], 0, "hang", ranks=[rank(0, "n1", "timed"), rank(1, "n2", "no answer")])
    two = bad(CASES[1], 0, "hang", ranks=[rank(0, "n2", "no answer"), rank(1, "n3", "no answer"), rank(2, "n1", "x")])
    assert silent_hosts([one, two]) == ("n2", "n3")
    assert silent_hosts([]) == ()
