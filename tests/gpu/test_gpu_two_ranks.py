"""Two ranks on one GPU compute correct results for what gloo carries only when staged by the host.

``one_gpu.sh`` has what gloo carries between CUDA tensors without staging.
"""

import pytest

from tests.support.ranks import Ranks
from tests.support.workloads.staged_steps import NCCL_ONLY_CASES, NamedCase

pytestmark = pytest.mark.gpu
TINY = {"shape": "tiny"}
STEPS: list[NamedCase] = [
    ("workload.fsdp", {**TINY, "reshard": True}),
    ("workload.fsdp", {**TINY, "reshard": False}),
    ("workload.hsdp", TINY),
    ("workload.tp", TINY),
    ("workload.tp_sp", TINY),
    ("workload.tp_fsdp", TINY),
    ("workload.ep_layer", TINY),
    ("workload.ep_step", TINY),
    ("workload.pp", TINY),
    ("workload.cp", {**TINY, "cp_method": "ring"}),
    ("workload.cp", {**TINY, "cp_method": "zigzag"}),
    ("workload.hybrid", {**TINY, "mesh": "dp=2"}),
]


@pytest.mark.parametrize(
    "case",
    [*NCCL_ONLY_CASES, *STEPS],
    ids=lambda case: f"{case[0]}-{list(case[1].values())[-1]}",
)
def test_two_ranks_are_correct(ranks_on_one_gpu: Ranks, case: NamedCase) -> None:
    failures = ranks_on_one_gpu.call(
        "tests.support.workloads.staged_steps:find_failures", cases=[case]
    )
    assert failures == [[], []]
