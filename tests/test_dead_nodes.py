"""Dead nodes: Slurm's word, the job's own list, and silence in a hang; never this host, never all."""

import pytest
from reports_fixtures import bad, collective
from sweeps import FakeSlurm

from bench.records import RankState, Record
from slurm.dead_nodes import DeadNodes, is_down

ENVIRON = {"SLURM_JOB_NODELIST": "n1,n2,n3,n4", "SLURM_JOB_ID": "7"}


def cluster(nodes: dict[str, str] | None = None, kept: str = "n1,n2,n3,n4", state: str = "RUNNING") -> FakeSlurm:
    return FakeSlurm().set(nodes=nodes or {}, jobs={"7": {"JobId": "7", "JobState": state, "NodeList": kept}})


def hang(*states: str, hosts: tuple[str, ...] = ("n1", "n2", "n3")) -> Record:
    ranks = [RankState(rank=i, host=hosts[i], pid=i, state=state) for i, state in enumerate(states)]
    return bad(collective(), 0, "hang", "no end within 10 s", ranks=ranks)


@pytest.mark.parametrize(
    ("state", "down"),
    [
        ("down", True),
        ("down*", True),
        ("idle*", True),
        ("allocated*", True),
        ("unknown", True),
        ("allocated", False),
        ("mixed", False),
        ("draining", False),
        ("drained", False),
        ("idle~", False),
        ("", False),
    ],
)
def test_states_of_sinfo(state: str, down: bool) -> None:
    assert is_down(state) is down


def test_all_nodes_are_alive_until_something_tells_otherwise() -> None:
    nodes = DeadNodes(cluster({"n1": "allocated", "n2": "mixed"}), ENVIRON)
    assert nodes.alive() == ("n1", "n2", "n3", "n4")
    assert nodes.look() == set()
    assert nodes.words() == ""


def test_a_node_that_slurm_has_down_is_dead_and_stays_so() -> None:
    slurm = cluster({"n3": "down*"})
    nodes = DeadNodes(slurm, ENVIRON)
    assert nodes.look() == {"n3"}
    slurm.set(nodes={"n3": "idle"})
    assert nodes.look() == {"n3"}
    assert nodes.alive() == ("n1", "n2", "n4")
    assert nodes.words() == "n3 is down"


def test_a_node_that_the_job_lost_is_dead_though_it_is_up_again() -> None:
    nodes = DeadNodes(cluster({"n3": "idle"}, kept="n1,n2,n4"), ENVIRON)
    assert nodes.look() == {"n3"}


@pytest.mark.parametrize(("kept", "state"), [("n1", "COMPLETING"), ("(null)", "PENDING"), ("", "RUNNING")])
def test_a_job_that_ends_gives_back_nodes_that_are_fine(kept: str, state: str) -> None:
    assert DeadNodes(cluster({"n3": "idle"}, kept, state), ENVIRON).look() == set()


def test_a_silent_host_is_dead_under_its_short_name() -> None:
    nodes = DeadNodes(cluster(), ENVIRON, host="n1.cluster")
    record = hang("timed, step 3", "timed, step 3", "no answer (process is stopped)", hosts=("n1.c", "n2.c", "n3.c"))
    assert nodes.look([record]) == {"n3"}
    assert nodes.words() == "n3 gives no answer"


def test_this_host_is_never_silent() -> None:
    assert DeadNodes(cluster(), ENVIRON, host="n2").look([hang("timed", "no answer", "timed")]) == set()


def test_where_nobody_answers_nobody_is_blamed() -> None:
    assert DeadNodes(cluster(), ENVIRON).look([hang("no answer", "no answer", "no answer")]) == set()


def test_a_host_with_one_answering_rank_is_not_silent() -> None:
    record = hang("no answer", "timed", "no answer", hosts=("n2", "n2", "n3"))
    assert DeadNodes(cluster(), ENVIRON).look([record]) == {"n3"}


def test_a_failure_that_is_no_hang_blames_nobody() -> None:
    ranks = [RankState(rank=0, host="n2", pid=1, state="no answer"), RankState(rank=1, host="n3", pid=1, state="alive")]
    assert DeadNodes(cluster(), ENVIRON).look([bad(collective(), ranks=ranks)]) == set()


def test_the_words_name_all_and_tell_down_from_silent() -> None:
    nodes = DeadNodes(cluster({"n2": "down", "n4": "down"}), ENVIRON, host="n1")
    nodes.look([hang("timed", "timed", "no answer")])
    assert nodes.words() == "n2 and n4 are down and n3 gives no answer"


def test_where_slurm_does_not_answer_only_silence_tells() -> None:
    slurm = cluster({"n2": "down"})
    nodes = DeadNodes(slurm, ENVIRON, host="n1")
    slurm.set(down=True)
    assert nodes.look([hang("timed", "timed", "no answer")]) == {"n3"}


def test_outside_of_a_job_there_are_no_nodes() -> None:
    slurm = FakeSlurm()
    nodes = DeadNodes(slurm, {})
    assert nodes.look([hang("timed", "timed", "no answer")]) == set()
    assert nodes.alive() == ()
    assert all(words[0] == "hostnames" for words in slurm.told), "Slurm is asked of no job"
