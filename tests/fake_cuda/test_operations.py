"""Operations on two stub GPUs."""

import pytest

from tests.fake_cuda.stub import Stub

pytestmark = pytest.mark.cuda_stub


def test_run_measures_all_reduce(stub: Stub) -> None:
    arguments = "--device cuda --nproc 2 --preset smoke --only all_reduce --launches 1"
    session = stub.parbench("run", *arguments.split(), "--budget", "10s")
    assert session.returncode == 0, session.output
    assert {record.status for record in session.records} == {"ok"}
    assert [trace.rank for trace in session.traces] == [0, 1]
