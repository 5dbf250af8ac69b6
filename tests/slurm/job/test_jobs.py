"""What jobs tell each other: claims that one process holds, ledgers of whole lines, dead nodes, the time left."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import permutations
from pathlib import Path

import pytest
from reports_fixtures import bad, collective
from sweeps import FakeSlurm

from parbench.bench.results.records import RankState, Record
from parbench.bench.text import UserError
from parbench.slurm.job.claims import FOLDER, Claims, Owner, is_gone, this_owner
from parbench.slurm.job.ledger import FOLDER as LEDGERS
from parbench.slurm.job.ledger import Ledger, Line, State, read_ledger, standings
from parbench.slurm.job.point_run import DeadNodes, is_down
from parbench.slurm.system import end_time, scale, too_long


def owner(job: str = "7", restart: int = 0, host: str = "n1", pid: int = 42) -> Owner:
    return Owner(job=job, restart=restart, host=host, pid=pid, token=f"token{job}")


def claims(folder: Path, job: str, gone: tuple[str, ...] = ()) -> Claims:
    return Claims(folder, owner(job), lambda other: other.job in gone)


def test_the_first_takes_and_the_second_learns_who_holds_until_it_is_given_back(tmp_path: Path) -> None:
    one, other = claims(tmp_path, "7"), claims(tmp_path, "8")
    for _ in range(3):
        assert one.take("p") is None
        assert other.take("p") == owner("7")
        one.give_back("p")
        assert other.take("p") is None
        assert one.take("p") == owner("8")
        other.give_back("p")
    assert other.take("q") is None
    kept = [f"p.{number}{free}" for number in range(6) for free in ("", ".free")]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [*kept, "q.0"]


def test_a_gone_owners_point_is_taken_over_once(tmp_path: Path) -> None:
    claims(tmp_path, "7").take("p")
    assert claims(tmp_path, "8").take("p") == owner("7")
    assert claims(tmp_path, "8", gone=("7",)).take("p") is None
    assert claims(tmp_path, "9", gone=("7",)).take("p") == owner("8")
    claims(tmp_path, "7").take("q")

    def slow_judge(other: Owner) -> bool:
        """9 finds 7 gone; before it acts, 8 has taken over: 9 must not break the claim of 8."""
        if other.job == "7":
            assert claims(tmp_path, "8", gone=("7",)).take("q") is None
        return other.job == "7"

    assert Claims(tmp_path, owner("9"), slow_judge).take("q") == owner("8")


def test_many_at_once_and_one_wins(tmp_path: Path) -> None:
    """Threads race for a fresh point, for one given back, and for one whose owner is gone."""
    first = claims(tmp_path, "7")
    first.take("back")
    first.give_back("back")
    first.take("gone")
    for point in ("fresh", "back", "gone"):
        racers = [claims(tmp_path, str(number), gone=("7",)) for number in range(100, 132)]
        with ThreadPoolExecutor(len(racers)) as pool:
            answers = list(pool.map(lambda one, point=point: one.take(point), racers))
        assert answers.count(None) == 1, point
        assert len({answer for answer in answers if answer}) == 1, "all others name the winner"


def test_what_file_systems_do_to_links_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.hardlink_to

    def made_but_denied(self: Path, target: Path) -> None:
        real(self, target)
        raise FileExistsError

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", made_but_denied)
    assert claims(tmp_path, "7").take("p") is None, "NFS says that a link was there which it has made"
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(UserError, match="without hard links, which claims need"):
        claims(tmp_path, "7").take("q")
    (tmp_path / FOLDER / "p.0").write_text("{")
    with pytest.raises(UserError, match=r"p\.0 is not what parbench wrote"):
        claims(tmp_path, "7").take("p")


def test_this_process_as_owner_and_who_is_gone() -> None:
    found = this_owner({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert (found.job, found.restart, found.pid) == ("7", 2, os.getpid())
    assert found.writer == f"7-r2-{found.host}-{os.getpid()}"
    assert this_owner({}).job == "none"
    assert this_owner({}).token != this_owner({}).token
    me = owner("7", restart=1, pid=os.getpid())
    for name, other, gone in (
        ("requeued", owner("7", restart=0), True),
        ("elsewhere", owner("7", restart=1, host="n2"), False),
        ("later", owner("7", restart=2), False),
        ("dead", owner("7", restart=1, pid=2**22 + 5), True),
        ("me", me, False),
        ("init", owner("7", restart=1, pid=1), False),
        ("forgotten", owner("8"), True),
        ("no job", owner("none"), False),
    ):
        assert is_gone(other, me, FakeSlurm()) is gone, name
    assert not is_gone(owner("8"), me, FakeSlurm().set(down=True)), "Slurm does not answer"
    for number, state, restarts, gone in (
        *(("8", "RUNNING", "0", False), ("8", "PENDING", "0", False), ("8", "COMPLETING", "0", False)),
        *(("8", "RUNNING", "1", True), ("8", "TIMEOUT", "0", True), ("9", "RUNNING", "0", True)),
    ):
        facts = {"JobId": number, "JobState": state, "Restarts": restarts}
        assert is_gone(owner("8"), me, FakeSlurm().set(jobs={"8": facts})) is gone, facts


def line(state: State, second: int = 0, point: str = "p", *, run: str = "", seconds: float = 0.0) -> Line:
    moment = f"2026-01-01T00:00:{second:02}.000Z"
    return Line(time=moment, point=point, state=state, job="7", run=run, seconds=seconds)


def test_lines_of_all_writers_are_merged_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ledger(tmp_path) == (), "none yet is an empty one"
    with Ledger(tmp_path, "7-r0-n1-42", "7") as ledger:
        written = (
            ledger.write("p", "started", nodes=("n1", "n2")),
            ledger.write("p", "failed", run="runs/p/a", reason="hang: of n2\nand n3", nodes=["n1"], seconds=1.23456),
        )
    assert read_ledger(tmp_path) == written
    assert (written[1].seconds, written[0].job) == (1.235, "7")
    tmp_path /= "several"
    tmp_path.mkdir()
    times = iter(f"2026-01-01T00:00:0{second}.000Z" for second in range(4))
    monkeypatch.setattr("parbench.slurm.job.ledger.utc_now", lambda: next(times))
    with Ledger(tmp_path, "same", "7") as one, Ledger(tmp_path, "same", "8") as other:
        for number, ledger in enumerate((one, other, one, other)):
            ledger.write(f"p{number}", "started")
    files = list((tmp_path / LEDGERS).iterdir())
    assert len(files) == 2
    assert all(file.name.startswith("same-") for file in files)
    found = [(line.point, line.job) for line in read_ledger(tmp_path)]
    assert found == [("p0", "7"), ("p1", "8"), ("p2", "7"), ("p3", "8")]


def test_a_killed_writer_loses_at_most_the_line_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(tmp_path, "w", "7") as ledger:
        ledger.write("p", "started")
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        ledger.write("p", "done")
        assert len(synced) == 1
        assert len(read_ledger(tmp_path)) == 2, "a line is on disk before the call returns"
    (file,) = (tmp_path / LEDGERS).iterdir()
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        file.write_bytes(whole[:length])
        assert [line.state for line in read_ledger(tmp_path)] == ["started"]


def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / LEDGERS).write_text("a file")
    with pytest.raises(UserError, match="takes no ledger: File exists"):
        Ledger(tmp_path / "file", "w", "7")
    real = os.write
    with Ledger(tmp_path, "w", "7") as ledger:
        monkeypatch.setattr(os, "write", lambda descriptor, content: 3)
        with pytest.raises(UserError, match="took 3 of"):
            ledger.write("p", "started")
        monkeypatch.setattr(os, "write", lambda descriptor, content: real(-1, content))
        with pytest.raises(UserError, match="takes no more lines: Bad file"):
            ledger.write("p", "started")
    (tmp_path / LEDGERS / "x.jsonl").write_text('{"time": 3}\n')
    with pytest.raises(UserError, match=r"x\.jsonl is not what parbench wrote: .*time"):
        read_ledger(tmp_path)


def test_the_last_word_counts_until_one_is_final_and_spoilt_runs_and_all_seconds_are_remembered() -> None:
    words: list[State] = ["postponed", "started", "interrupted", "started", "lost-node"]
    lines = [line(state, second) for second, state in enumerate(words)]
    for upto in range(1, 6):
        found = standings(lines[:upto])["p"]
        assert (found.state, found.is_final) == (words[upto - 1], False)
    assert standings([line("failed"), line("started", 1)])["p"].state == "failed"
    assert standings([line("failed")])["p"].is_final
    for order in permutations(["started", "interrupted", "failed", "done"]):  # two hosts' clocks may differ
        found = standings(line(state, second) for second, state in enumerate(order))["p"]  # type: ignore[arg-type]
        assert (found.state, found.is_final) == ("done", True), order
    lines = [line("lost-node", 0, run="a", seconds=2.0), line("interrupted", 1, run="b"), line("lost-node", 2, run="c")]
    lines += [line("lost-node", 3), line("done", 4, run="d", seconds=3.0), line("done", 2, "q", seconds=7.0)]
    assert standings(lines)["p"].lost_runs == {"a", "c"}
    assert {name: standing.seconds for name, standing in standings(lines).items()} == {"p": 5.0, "q": 7.0}


ENVIRON = {"SLURM_JOB_NODELIST": "n1,n2,n3,n4", "SLURM_JOB_ID": "7"}


def cluster(nodes: dict[str, str] | None = None, kept: str = "n1,n2,n3,n4", state: str = "RUNNING") -> FakeSlurm:
    return FakeSlurm().set(nodes=nodes or {}, jobs={"7": {"JobId": "7", "JobState": state, "NodeList": kept}})


def hang(*states: str, hosts: tuple[str, ...] = ("n1", "n2", "n3")) -> Record:
    ranks = [RankState(rank=i, host=hosts[i], pid=i, state=state) for i, state in enumerate(states)]
    return bad(collective(), 0, "hang", "no end within 10 s", ranks=ranks)


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


def test_a_host_is_dead_where_it_alone_is_silent_in_a_hang_and_words_tell_down_from_silent() -> None:
    long = hang("timed, step 3", "timed", "no answer (process is stopped)", hosts=("n1.c", "n2.c", "n3.c"))
    ranks = [RankState(rank=0, host="n2", pid=1, state="no answer"), RankState(rank=1, host="n3", pid=1, state="alive")]
    for why, record, dead in (
        ("under its short name", long, {"n3"}),
        ("this host is never silent", hang("no answer", "timed", "timed"), set()),
        ("nobody answers", hang("no answer", "no answer", "no answer"), set()),
        ("one rank answers", hang("no answer", "timed", "no answer", hosts=("n2", "n2", "n3")), {"n3"}),
        ("no hang", bad(collective(), ranks=ranks), set()),
    ):
        assert DeadNodes(cluster(), ENVIRON, host="n1.cluster").look([record]) == dead, why
    nodes = DeadNodes(cluster({"n2": "down", "n4": "down"}), ENVIRON, host="n1")
    nodes.look([hang("timed", "timed", "no answer")])
    assert nodes.words() == "n2 and n4 are down and n3 gives no answer"
    nodes = DeadNodes(cluster(), ENVIRON, host="n1")
    assert nodes.look([hang("timed", "no answer", "timed"), hang("timed", "no answer", "no answer")]) == {"n2", "n3"}
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


def test_when_a_job_ends_what_does_not_fit_and_how_estimates_are_scaled() -> None:
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
        assert end_time(job, {"SLURM_JOB_END_TIME": variable} if variable else {}) == end, (job, variable)
    assert too_long(94.2, 60.9) == "needs about 95 s, 60 s are left"
    assert too_long(5.0, -3.0) == "needs about 5 s, 0 s are left"
    assert too_long(60.0, 60.0) == too_long(1e9, math.inf) == ""
    known: list[tuple[list[tuple[float, float]], float]] = [([], 1.0), ([(20, 10)], 2.0), ([(1, 100)], 0.2)]
    for pairs, factor in [*known, ([(20.0, 10.0), (10.0, 20.0)], 1.0), ([(900.0, 1.0)], 5.0)]:
        assert scale(pairs) == pytest.approx(factor)
