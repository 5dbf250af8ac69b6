"""Records of a run in which one rank launches slowly, or misses a collective."""

from dataclasses import replace

import pytest

from tests.fake_cuda.stub import Session, Stub

pytestmark = pytest.mark.cuda_stub
RUN = "run --device cuda --nproc 2 --preset smoke --repetitions 1 --budget 30s --timeout 15s"


def run_all_reduce(stub: Stub, *options: str, **variables: str) -> Session:
    """Run a small all_reduce with settings of the stub."""
    arguments = [*RUN.split(), "all_reduce", "--set", "size_bytes=1K", *options]
    return replace(stub, variables=variables).parbench(*arguments)


def launch_hidden(session: Session) -> float:
    [record] = session.records
    assert record.status == "ok", record.reason
    return float(record.details["launch_hidden"])


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_slow_launches_of_a_rank_are_not_hidden(stub: Stub, slow_rank: int) -> None:
    # 2 ms for each launch exceed what the start line hides.
    session = run_all_reduce(stub, FAKE_CUDA_SLOW=f"{slow_rank}:2000000")
    assert launch_hidden(session) < 0.5


def test_rank_that_misses_a_collective_is_blamed(stub: Stub) -> None:
    target = "tests.support.faults:asleep --set rank=1 --set at=8"
    session = replace(stub, has_values=True).parbench(*RUN.split(), *target.split())
    [record] = session.records
    assert record.status == "hang"
    assert "rank 1 did not arrive" in record.reason


def test_facts_about_gpus_take_one_process_of_a_run(stub: Stub) -> None:
    session = run_all_reduce(stub, "--repetitions", "3", "--budget", "90s")
    assert [record.status for record in session.records] == ["ok"] * 3, session.output
    assert len((stub.folder / "nvml.log").read_text().split()) == 1


def test_check_names_the_slow_gpu(stub: Stub) -> None:
    slow = replace(stub, num_gpus=3, variables={"FAKE_CUDA_SLOW_DEVICE": "2:140"})
    session = slow.parbench("check", "--budget", "4m")
    assert session.returncode == 1, session.output
    assert "bad  GPU 2: slower than its peers:" in session.output
