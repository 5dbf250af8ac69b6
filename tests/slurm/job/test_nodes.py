"""The dead nodes of a job, as Slurm and the records of hangs show them."""

import pytest

from parbench.bench.results.records import RankState, Record
from parbench.slurm.job.nodes import NodeMonitor
from tests.support.fakes import make_fake_case
from tests.support.reports.reports_fixtures import failed_record
from tests.support.slurm.sweeps import FakeSlurm

CASE = make_fake_case(0)
ENVIRON = {
    "SLURM_JOB_NODELIST": "n1,n2,n3,n4",
    "SLURMD_NODENAME": "n1",
}
NO_ANSWER = "no answer (process is stopped)"


def make_hang(states: dict[str, str]) -> Record:
    """Build a record of a hang with one rank on each host."""
    ranks = [
        RankState(
            rank=rank,
            host=host,
            pid=1,
            state=state,
            is_silent=state == NO_ANSWER,
        )
        for rank, (host, state) in enumerate(states.items())
    ]
    return failed_record(CASE, status="hang", ranks=ranks)


@pytest.mark.parametrize("state", ["down", "idle*", "unknown"])
def test_node_that_slurm_lost_is_dead(state: str) -> None:
    slurm = FakeSlurm(nodes={"n1": "mixed", "n2": "drained", "n3": state})
    nodes = NodeMonitor(slurm, ENVIRON)
    assert nodes.update() == {"n3"}
    assert nodes.list_alive() == ("n1", "n2", "n4")
    assert nodes.describe() == "n3 is down"
    slurm.nodes = {}
    assert nodes.update() == {"n3"}, "a dead node stays dead for the job"


@pytest.mark.parametrize(
    ("states", "dead"),
    [
        (
            {"n1.cluster": "timed", "n2.cluster": NO_ANSWER, "n3.cluster": NO_ANSWER},
            {"n2", "n3"},
        ),
        ({"n1.cluster": NO_ANSWER, "n2.cluster": "timed"}, set()),
        ({"n1.cluster": NO_ANSWER, "n2.cluster": NO_ANSWER}, set()),
    ],
    ids=["silent", "own-host", "all-silent"],
)
def test_silent_hosts_of_a_hang_are_dead(states: dict[str, str], dead: set[str]) -> None:
    assert NodeMonitor(FakeSlurm(), ENVIRON).update([make_hang(states)]) == dead


def test_monitor_without_an_answer_of_slurm() -> None:
    slurm = FakeSlurm(nodes={"n2": "down"})
    nodes = NodeMonitor(slurm, ENVIRON)
    slurm.is_down = True
    hang = make_hang({"n1.cluster": "timed", "n3.cluster": NO_ANSWER})
    assert nodes.update([hang]) == {"n3"}
    assert nodes.describe() == "n3 does not answer"
    assert NodeMonitor(FakeSlurm(), {}).update([hang]) == set()
