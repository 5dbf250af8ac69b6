"""Claims: exactly one process holds a point, a gone owner's point is taken over once, and doubt counts as alive."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sweeps import FakeSlurm

from bench.errors import UserError
from slurm.claims import FOLDER, Claims, Owner, is_gone, job_lives, this_owner

ROOT = Path(__file__).parent.parent


def owner(job: str = "7", **more: object) -> Owner:
    given = {"restart": 0, "host": "n1", "pid": 42, "token": f"token{job}"}
    return Owner(job=job, **{**given, **more})  # type: ignore[arg-type]


def claims(folder: Path, who: Owner, gone: tuple[str, ...] = ()) -> Claims:
    return Claims(folder, who, lambda other: other.job in gone)


def test_the_first_takes_and_the_second_learns_who_holds(tmp_path: Path) -> None:
    assert claims(tmp_path, owner("7")).take("p") is None
    assert claims(tmp_path, owner("8")).take("p") == owner("7")
    assert claims(tmp_path, owner("8")).take("q") is None


def test_what_is_given_back_can_be_taken_again_by_anyone(tmp_path: Path) -> None:
    one, other = claims(tmp_path, owner("7")), claims(tmp_path, owner("8"))
    for _ in range(3):
        assert one.take("p") is None
        one.give_back("p")
        assert other.take("p") is None
        assert one.take("p") == owner("8")
        other.give_back("p")


def test_a_gone_owners_point_is_taken_over(tmp_path: Path) -> None:
    claims(tmp_path, owner("7")).take("p")
    assert claims(tmp_path, owner("8")).take("p") == owner("7")
    assert claims(tmp_path, owner("8"), gone=("7",)).take("p") is None
    assert claims(tmp_path, owner("9"), gone=("7",)).take("p") == owner("8")


def test_one_who_judged_too_early_takes_nothing_from_the_next_owner(tmp_path: Path) -> None:
    """9 finds 7 gone; before it acts, 8 has taken over: 9 must not break the claim of 8."""
    claims(tmp_path, owner("7")).take("p")

    def slow_judge(other: Owner) -> bool:
        if other.job == "7":
            assert claims(tmp_path, owner("8"), gone=("7",)).take("p") is None
        return other.job == "7"

    assert Claims(tmp_path, owner("9"), slow_judge).take("p") == owner("8")


def test_many_at_once_and_one_wins(tmp_path: Path) -> None:
    """Threads race for a fresh point, for one given back, and for one whose owner is gone."""
    first = claims(tmp_path, owner("7"))
    first.take("back")
    first.give_back("back")
    first.take("gone")
    for point in ("fresh", "back", "gone"):
        racers = [claims(tmp_path, owner(str(number)), gone=("7",)) for number in range(100, 132)]
        with ThreadPoolExecutor(len(racers)) as pool:
            answers = list(pool.map(lambda one, point=point: one.take(point), racers))
        assert answers.count(None) == 1, point
        assert len({answer for answer in answers if answer}) == 1, "all others name the winner"


def test_processes_race_and_one_wins(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom slurm.claims import Claims, this_owner\n"
        "claims = Claims(Path(sys.argv[1]), this_owner({'SLURM_JOB_ID': sys.argv[2]}), lambda other: False)\n"
        "time.sleep(max(float(sys.argv[3]) - time.time(), 0))\n"
        "print(sum(claims.take(f'p{number}') is None for number in range(50)))"
    )
    import time

    start = str(time.time() + 1.5)
    words = [sys.executable, "-c", script, str(tmp_path)]
    racers = [
        subprocess.Popen([*words, str(number), start], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    assert sum(int(racer.communicate(timeout=60)[0]) for racer in racers) == 50


def test_nothing_but_claims_is_left(tmp_path: Path) -> None:
    one = claims(tmp_path, owner("7"))
    one.take("p")
    claims(tmp_path, owner("8")).take("p")
    one.give_back("p")
    claims(tmp_path, owner("8")).take("p")
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["p.0", "p.0.free", "p.1"]


def test_a_link_that_was_made_though_nfs_says_it_was_there_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.hardlink_to

    def made_but_denied(self: Path, target: Path) -> None:
        real(self, target)
        raise FileExistsError

    monkeypatch.setattr(Path, "hardlink_to", made_but_denied)
    assert claims(tmp_path, owner("7")).take("p") is None


def test_a_file_system_without_links_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(UserError, match="without hard links, which claims need"):
        claims(tmp_path, owner("7")).take("p")


def test_a_damaged_claim_is_named(tmp_path: Path) -> None:
    one = claims(tmp_path, owner("7"))
    (tmp_path / FOLDER / "p.0").write_text("{")
    with pytest.raises(UserError, match=r"p\.0 is not what parbench wrote"):
        one.take("p")


def test_this_process_as_owner() -> None:
    found = this_owner({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert (found.job, found.restart, found.pid) == ("7", 2, os.getpid())
    assert found.writer == f"7-r2-{found.host}-{os.getpid()}"
    assert this_owner({}).job == "none"
    assert this_owner({}).token != this_owner({}).token


@pytest.mark.parametrize(
    ("other", "lives", "gone"),
    [
        (owner("8"), True, False),
        (owner("8"), False, True),
        (owner("8"), None, False),
        (owner("7", restart=0), None, True),
        (owner("7", restart=1, host="n2"), None, False),
        (owner("7", restart=2), None, False),
        (owner("7", restart=1, pid=2**22 + 5), None, True),
        (owner("7", restart=1, pid=os.getpid()), None, False),
        (owner("7", restart=1, pid=1), None, False),
    ],
    ids=["other-lives", "other-gone", "no-answer", "requeued", "elsewhere", "later", "dead", "me", "init"],
)
def test_who_is_gone(other: Owner, lives: bool | None, gone: bool) -> None:
    me = owner("7", restart=1, pid=os.getpid())
    assert is_gone(other, me, lambda whose: lives) is gone


@pytest.mark.parametrize(
    ("facts", "lives"),
    [
        ({"JobId": "8", "JobState": "RUNNING", "Restarts": "0"}, True),
        ({"JobId": "8", "JobState": "PENDING", "Restarts": "0"}, True),
        ({"JobId": "8", "JobState": "COMPLETING", "Restarts": "0"}, True),
        ({"JobId": "8", "JobState": "RUNNING", "Restarts": "1"}, False),
        ({"JobId": "8", "JobState": "TIMEOUT", "Restarts": "0"}, False),
        ({"JobId": "9", "JobState": "RUNNING", "Restarts": "0"}, False),
    ],
)
def test_what_slurm_tells_of_a_job(facts: dict[str, str], lives: bool) -> None:
    assert job_lives(FakeSlurm().set(jobs={"8": facts}), owner("8")) is lives


def test_a_job_that_slurm_has_forgotten_is_gone_and_silence_is_not_an_answer() -> None:
    assert job_lives(FakeSlurm(), owner("8")) is False
    assert job_lives(FakeSlurm().set(down=True), owner("8")) is None
    assert job_lives(FakeSlurm(), owner("none")) is None
