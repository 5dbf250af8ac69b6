"""The saved states of points, dead nodes, and the time left."""

import math
from datetime import datetime
from pathlib import Path

import pytest

from parbench.bench.results.records import RankState, Record
from parbench.bench.text import UserError
from parbench.slurm.job.point_run import DeadNodes, is_down
from parbench.slurm.job.state import FOLDER, SavedState, exit_code, read_states, write_state
from parbench.slurm.system import end_time, too_long
from tests.support.reports_fixtures import collective_case, failed_record
from tests.support.sweeps import FakeSlurm, make_folder, make_point, make_sweep


def test_states_are_replaced_whole_and_read_by_point(tmp_path: Path) -> None:
    points = [make_point(0), make_point(1)]
    folder = make_folder(tmp_path, make_sweep(points))
    assert read_states(folder, points) == {}
    done = SavedState(
        state="done",
        job="7",
        time="t",
        run="runs/a",
        nodes=("n1", "n2"),
        seconds=1.5,
        lost_runs=("b",),
    )
    for state in (SavedState(state="started", job="7", time="t"), done):
        write_state(folder, points[1].id, state)
        assert read_states(folder, points) == {points[1].id: state}
    (folder / FOLDER / f"{points[0].id}.json").write_text('{"state": "lost"}')
    with pytest.raises(UserError, match=rf"{points[0].id}\.json is not what parbench wrote: "):
        read_states(folder, points)
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_state(tmp_path / "absent", "p", done)


def test_exit_code_puts_wrong_results_first() -> None:
    points = [make_point(0), make_point(1)]
    done = SavedState(state="done", job="7", time="t")
    failed = SavedState(state="failed", job="7", time="t")
    wrong = SavedState(state="failed", job="7", time="t", has_wrong_results=True)
    for states, code in (
        ([done, done], 0),
        ([done], 4),
        ([done, failed], 4),
        ([failed, wrong], 1),
        ([wrong], 1),
    ):
        assert (
            exit_code({one.id: state for one, state in zip(points, states, strict=False)}, points)
            == code
        )


ENVIRON = {"SLURM_JOB_NODELIST": "n1,n2,n3,n4", "SLURM_JOB_ID": "7"}


def cluster(
    nodes: dict[str, str] | None = None, kept: str = "n1,n2,n3,n4", state: str = "RUNNING"
) -> FakeSlurm:
    return FakeSlurm().set(
        nodes=nodes or {}, jobs={"7": {"JobId": "7", "JobState": state, "NodeList": kept}}
    )


def hang(*states: str, hosts: tuple[str, ...] = ("n1", "n2", "n3")) -> Record:
    ranks = [RankState(rank=i, host=hosts[i], pid=i, state=state) for i, state in enumerate(states)]
    return failed_record(collective_case(), 0, "hang", "no end within 10 s", ranks=ranks)


def test_a_node_that_slurm_has_down_is_dead_and_stays_so() -> None:
    for state in ("down", "down*", "idle*", "allocated*", "unknown"):
        assert is_down(state), state
    for state in ("allocated", "mixed", "draining", "drained", "idle~", ""):
        assert not is_down(state), state
    slurm = cluster({"n1": "allocated", "n2": "mixed"})
    nodes = DeadNodes(slurm, ENVIRON)
    assert (nodes.look(), nodes.alive(), nodes.words()) == (set(), ("n1", "n2", "n3", "n4"), "")
    slurm.set(nodes={"n3": "down*"})
    assert nodes.look() == {"n3"}
    slurm.set(nodes={"n3": "idle"})
    assert nodes.look() == {"n3"}
    assert (nodes.alive(), nodes.words()) == (("n1", "n2", "n4"), "n3 is down")


def test_a_node_that_the_job_lost_is_dead_and_one_that_an_ending_job_gives_back_is_not() -> None:
    assert DeadNodes(cluster({"n3": "idle"}, kept="n1,n2,n4"), ENVIRON).look() == {"n3"}
    for kept, state in (("n1", "COMPLETING"), ("(null)", "PENDING"), ("", "RUNNING")):
        assert DeadNodes(cluster({"n3": "idle"}, kept, state), ENVIRON).look() == set(), state


def test_a_host_is_dead_where_it_alone_is_silent_in_a_hang_and_words_tell_down_from_silent() -> (
    None
):
    long = hang(
        "timed, step 3", "timed", "no answer (process is stopped)", hosts=("n1.c", "n2.c", "n3.c")
    )
    ranks = [
        RankState(rank=0, host="n2", pid=1, state="no answer"),
        RankState(rank=1, host="n3", pid=1, state="alive"),
    ]
    for why, record, dead in (
        ("under its short name", long, {"n3"}),
        ("this host is never silent", hang("no answer", "timed", "timed"), set()),
        ("nobody answers", hang("no answer", "no answer", "no answer"), set()),
        (
            "one rank answers",
            hang("no answer", "timed", "no answer", hosts=("n2", "n2", "n3")),
            {"n3"},
        ),
        ("no hang", failed_record(collective_case(), ranks=ranks), set()),
    ):
        assert DeadNodes(cluster(), ENVIRON, host="n1.cluster").look([record]) == dead, why
    nodes = DeadNodes(cluster({"n2": "down", "n4": "down"}), ENVIRON, host="n1")
    nodes.look([hang("timed", "timed", "no answer")])
    assert nodes.words() == "n2 and n4 are down and n3 gives no answer"
    nodes = DeadNodes(cluster(), ENVIRON, host="n1")
    assert nodes.look(
        [hang("timed", "no answer", "timed"), hang("timed", "no answer", "no answer")]
    ) == {"n2", "n3"}
    assert nodes.words() == "n2 and n3 give no answer"


def test_where_slurm_does_not_answer_only_silence_tells_and_outside_of_a_job_nothing() -> None:
    slurm, record = cluster({"n2": "down"}), hang("timed", "timed", "no answer")
    nodes = DeadNodes(slurm, ENVIRON, host="n1")
    slurm.set(down=True)
    assert nodes.look([record]) == {"n3"}
    slurm = FakeSlurm()
    nodes = DeadNodes(slurm, {})
    assert (nodes.look([record]), nodes.alive()) == (set(), ())
    assert all(words[0] == "hostnames" for words in slurm.told), "Slurm is asked of no job"


def test_end_time_of_a_job_and_what_does_not_fit() -> None:
    told = {"TimeLimit": "01:00:00", "EndTime": "2026-11-21T21:38:33"}
    local = datetime(2026, 11, 21, 21, 38, 33).timestamp()
    for job, variable, end in (
        (told, "", local),
        (told, "12", local),  # a limit may be moved: scontrol goes before the environment
        ({"TimeLimit": "UNLIMITED", "EndTime": "2027-11-21T21:38:33"}, "", math.inf),
        ({"TimeLimit": "01:00:00", "EndTime": "Unknown"}, "", math.inf),
        ({"EndTime": "N/A"}, "1700000000", 1.7e9),
        ({}, "0", math.inf),
        ({}, "soon", math.inf),
    ):
        assert end_time(job, {"SLURM_JOB_END_TIME": variable} if variable else {}) == end, (
            job,
            variable,
        )
    assert too_long(94.2, 60.9) == "needs about 95 s, 60 s are left"
    assert too_long(5.0, -3.0) == "needs about 5 s, 0 s are left"
    assert too_long(60.0, 60.0) == too_long(1e9, math.inf) == ""
