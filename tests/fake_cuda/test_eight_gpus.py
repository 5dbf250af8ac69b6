"""Operations and training steps on eight stub GPUs, with meshes of three axes."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_cuda.build import Installation
from tests.fake_cuda.stub import RanksOnStub, Stub
from tests.fake_cuda.test_operations import CASES, SIZE
from tests.fake_cuda.test_steps import SMALL

pytestmark = pytest.mark.cuda_stub
STEPS: dict[str, dict[str, Any]] = {
    "workload.tp_sp": {"heads": 8},
    "workload.ep_step": {},
    "workload.hybrid": {"mesh": "dp=2,pp=2,tp=2"},
}


@pytest.fixture(scope="module")
def eight_ranks_on_stub(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RanksOnStub]:
    """Eight NCCL ranks on stub GPUs that run functions of tests."""
    folder = tmp_path_factory.mktemp("eight")
    with RanksOnStub(Stub(installation, folder, num_gpus=8, has_values=True)) as ranks:
        yield ranks


def measure(ranks: RanksOnStub, name: str, params: dict[str, Any]) -> tuple[str, str]:
    """Measure a case on all ranks, and return rank 0's status and reason."""
    function = "tests.fake_cuda.cases:measure_case"
    [(status, reason, _), *_] = ranks.call(function, name=name, params=params, label=name)
    return status, reason


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_operation_is_correct_on_eight_gpus(
    eight_ranks_on_stub: RanksOnStub, name: str, mode: str
) -> None:
    size = {} if name == "collective.barrier" else SIZE
    assert measure(eight_ranks_on_stub, name, {"mode": mode, **size}) == ("ok", "")


@pytest.mark.parametrize("name", STEPS)
def test_step_is_correct_on_eight_gpus(eight_ranks_on_stub: RanksOnStub, name: str) -> None:
    assert measure(eight_ranks_on_stub, name, {**SMALL, **STEPS[name]}) == ("ok", "")
