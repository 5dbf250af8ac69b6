"""One point's child: its words, its end, and what its run folder says came of it."""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from parbench.bench.launch.control_channel import LEFT_OUT
from parbench.bench.results.records import Record
from parbench.bench.results.runs import create_run, load_run, open_writer, write_info
from parbench.slurm.job.point_run import (
    Attempt,
    Child,
    Command,
    begun_run,
    broken_records,
    forget_broken,
    outcome_of,
    parbench_run,
    progress,
    relative,
)
from parbench.slurm.job.state import State
from tests.support.fakes import make_fake_case, make_plan
from tests.support.reports_fixtures import failed_record, ok_record
from tests.support.standin import standin
from tests.support.sweeps import make_folder, make_point, make_sweep

CASES = tuple(make_fake_case(number) for number in range(3))
P = make_point()


def attempt(tmp_path: Path, **more: Any) -> Attempt:
    sweep = make_sweep([P])
    given = {
        "folder": make_folder(tmp_path, sweep),
        "sweep": sweep,
        "point": P,
        "nodes": ("n1", "n3"),
        "run": None,
    }
    return Attempt(**{**given, **more})


def ended(asked: Attempt, command: Command) -> Child:
    child = Child(asked, command)
    child.end(30.0)
    return child


def written(out: Path, *records: Record, hosts: list[str] | None = None) -> Path:
    path, info = create_run(out, make_plan(CASES), "0")
    write_info(path, msgspec.structs.replace(info, environment={"hosts": hosts}))
    with open_writer(path) as writer:
        for record in records:
            writer.write(record)
    return path


def test_the_words_of_a_run_that_is_fresh_or_gone_on_with_are_such_as_parbench_takes(
    tmp_path: Path,
) -> None:
    asked = attempt(tmp_path)
    assert parbench_run(asked) == [
        *(
            sys.executable,
            "-m",
            "parbench",
            "run",
            "--json",
            "--nodelist",
            "n1,n3",
            "--launcher",
            "srun",
        ),
        *("--nodes", "2", "--ntasks-per-node", "1", "--placement", "block"),
        *(
            "--plan",
            str(asked.folder / "points" / f"{P.id}.json"),
            "--out",
            str(asked.folder / "runs" / P.id),
        ),
    ]
    words = parbench_run(attempt(tmp_path, sweep=make_sweep([P], link="400Gbit"), nodes=()))
    assert words[-2:] == ["--link", "400Gbit"]
    assert "--nodelist" not in words
    words = parbench_run(attempt(tmp_path, run=tmp_path / "r"))
    assert words[5:] == ["--nodelist", "n1,n3", "--resume", str(tmp_path / "r")]
    child = ended(
        asked, parbench_run
    )  # the real command line reads them, and refuses that there is no allocation
    assert child.code == 2
    assert re.match("parbench: .*srun", child.last_line())


def test_a_child_measures_with_the_points_variables_and_its_last_words_are_kept(
    tmp_path: Path,
) -> None:
    asked = attempt(tmp_path)
    child = ended(asked, standin(cases=3, each=0))
    run = begun_run(asked.folder, P, ())
    assert run is not None
    found = outcome_of(run, child.code, child.last_line())
    assert (found.state, found.reason, found.measured) == ("done", "", 3)
    assert relative(asked.folder, run) == f"runs/{P.id}/{run.name}"
    options = ("--container-image=a", "--mem=0")
    asked = attempt(
        tmp_path,
        point=make_point(variables={"A": "7"}),
        sweep=make_sweep([P], srun_options=options),
    )
    script = 'echo "$A" $PARBENCH_SRUN_OPTIONS >&2'
    assert (
        ended(asked, lambda _: ["sh", "-c", script]).last_line() == "7 --container-image=a --mem=0"
    )
    assert ended(asked, lambda _: ["true"]).last_line() == "", (
        "an earlier attempt's are not its own"
    )


def test_the_verdict_of_records_and_where_no_run_was_begun_only_bad_input_is_final(
    tmp_path: Path,
) -> None:
    missing = "measurements are missing, the run ended with exit code 4: words"
    known: list[tuple[list[Record], State, str]] = [
        ([ok_record(CASES[0]), ok_record(CASES[1]), ok_record(CASES[2])], "done", ""),
        (
            [
                ok_record(CASES[0]),
                ok_record(CASES[1]),
                failed_record(CASES[2], 0, "skipped", LEFT_OUT),
            ],
            "done",
            "",
        ),
        (
            [
                ok_record(CASES[0]),
                failed_record(CASES[1], 0, "hang", "late"),
                failed_record(CASES[2], 0, "wrong", "3"),
            ],
            "failed",
            "wrong: {2}: 3",
        ),
        (
            [
                ok_record(CASES[0]),
                failed_record(CASES[1], reason="a"),
                failed_record(CASES[2], reason="b"),
            ],
            "failed",
            "failed: {1}: a (and 1 more)",
        ),
        ([ok_record(CASES[0])], "interrupted", f"2 of 3 {missing}"),
        ([], "interrupted", f"3 of 3 {missing}"),
        ([failed_record(CASES[0])], "interrupted", f"failed: {{0}}: it broke; 2 of 3 {missing}"),
    ]
    for records, state, reason in known:
        found = outcome_of(written(tmp_path, *records), 4, "words")
        assert (found.state, found.reason) == (
            state,
            reason.format(*(make_fake_case.label for make_fake_case in CASES)),
        )
        assert found.measured == len(records)
        assert found.has_wrong_results == any(record.status == "wrong" for record in records)
    run = written(tmp_path)
    assert outcome_of(run, 4, str(run)).reason == f"3 of 3 {missing.removesuffix(': words')}", (
        "its name is no reason"
    )
    assert outcome_of(run, 2, "parbench: the disk is full").state == "failed", "not tried for ever"
    assert outcome_of(written(tmp_path, hosts=["n1", "n1", "n3"]), 0, "").hosts == ("n1", "n3")
    assert outcome_of(run, 0, "").hosts == ()
    (run / "run.json").write_text("{}")
    found = outcome_of(run, 0, "")
    assert (found.state, "run.json is not what parbench wrote" in found.reason) == ("failed", True)
    found = outcome_of(None, 2, "parbench: --nodes 9: job 7 has 4")
    assert (found.state, found.reason) == ("failed", "parbench: --nodes 9: job 7 has 4")
    found = outcome_of(None, -9, "")
    assert (found.state, found.reason) == (
        "interrupted",
        "the run ended with SIGKILL before it began",
    )
    assert outcome_of(None, -40, "").reason == "the run ended with signal 40 before it began", (
        "which has no name"
    )
    assert outcome_of(None, 1, "Traceback").state == "interrupted"
    assert broken_records(None) == ()


def test_the_newest_whole_run_is_gone_on_with_and_no_spoilt_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_sweep([P]))
    assert begun_run(folder, P, ()) is None
    for name in ("20260101T000000Z-a", "20260102T000000Z-a", "20260103T000000Z-a"):
        (folder / "runs" / P.id / name).mkdir(parents=True)
        (folder / "runs" / P.id / name / "records.jsonl").touch()
        if "03T" not in name:
            (folder / "runs" / P.id / name / "run.json").touch()
    newest, older = (
        folder / "runs" / P.id / "20260102T000000Z-a",
        folder / "runs" / P.id / "20260101T000000Z-a",
    )
    assert begun_run(folder, P, ()) == newest
    assert begun_run(folder, P, {relative(folder, newest)}) == older


def test_hangs_and_failures_alone_are_broken_and_those_of_the_jobs_end_forgotten(
    tmp_path: Path,
) -> None:
    run = written(
        tmp_path,
        ok_record(CASES[0]),
        failed_record(CASES[1], 0, "hang"),
        failed_record(CASES[2], 0, "wrong"),
    )
    assert [record.case.id for record in broken_records(run)] == [CASES[1].id]
    early, late = "2026-01-01T00:00:01.000Z", "2026-01-01T00:00:09.000Z"
    run = written(
        tmp_path,
        failed_record(CASES[0], started=early),
        ok_record(CASES[1], started=late),
        failed_record(CASES[2], started=late),
    )
    forget_broken(run, "2026-01-01T00:00:05.000Z")
    assert [record.case.id for record in load_run(run).records] == [CASES[0].id, CASES[1].id]
    assert progress(load_run(run)) == (2, 3)
