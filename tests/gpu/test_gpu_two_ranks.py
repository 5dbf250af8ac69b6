"""Two ranks on one GPU: what gloo carries there by itself is in ``one_gpu.sh``, all else here, staged by the host."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks
from tests.support.staged_steps import NCCL_ALONE, Asked

pytestmark = pytest.mark.gpu

TINY = {"shape": "tiny"}
STEPS: list[Asked] = [
    *(("workload.fsdp", {**TINY, "reshard": reshard}) for reshard in (True, False)),
    *(
        (f"workload.{name}", dict(TINY))
        for name in ("hsdp", "tp", "tp_sp", "tp_fsdp", "ep_layer", "ep_step", "pp")
    ),
    *(("workload.cp", {**TINY, "method": method}) for method in ("ring", "striped", "zigzag")),
    ("workload.hybrid", {**TINY, "mesh": "dp=2"}),
]


@pytest.fixture(scope="module")
def on_one_gpu() -> Iterator[Ranks]:
    with Ranks(2, "cuda") as ranks:
        yield ranks


@pytest.mark.parametrize(
    "asked", [*NCCL_ALONE, *STEPS], ids=lambda asked: f"{asked[0]}-{list(asked[1].values())[-1]}"
)
def test_two_ranks_on_one_gpu_are_right(on_one_gpu: Ranks, asked: Asked) -> None:
    assert on_one_gpu.call("tests.support.staged_steps:not_well", asked=[asked]) == [[], []]
