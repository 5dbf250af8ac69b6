"""A file of PyTorch's profiler says of a real step what the probe says of the same step."""

from pathlib import Path
from typing import Any

import pytest

from parbench.reports.traces.steps import read_job
from tests.support.ranks import Ranks

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"bucket_mb": 1, "layers": 4, "hidden": 128}),
    "fsdp": ("fsdp", {"layers": 2, "compute": "timed:10ms"}),
}


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_profiler_file_agrees_with_the_probe(two_ranks: Ranks, name: str, tmp_path: Path) -> None:
    step, params = STEPS[name]
    probed = two_ranks.call(
        "tests.support.profiled:both_ways", name=step, params=params, folder=str(tmp_path)
    )
    job = read_job([tmp_path])
    assert len(job.ranks) == 2
    for rank, theirs in zip(job.ranks, probed, strict=True):
        ours = rank.steps[0].parts
        whole = ours.wall_seconds
        assert ours.compute_seconds == pytest.approx(theirs["compute_seconds"], rel=0.05)
        exposed = sum(ours.exposed_comm_seconds.values())
        assert exposed == pytest.approx(
            sum(theirs["exposed_comm_seconds"].values()), rel=0.05, abs=0.001 * whole
        )
        assert ours.idle_seconds == pytest.approx(
            theirs["idle_seconds"], rel=0.05, abs=0.001 * whole
        )
    assert {call.facts.size for call in job.shared} == {2}
    assert all(call.facts.num_bytes is None or call.facts.num_bytes > 0 for call in job.shared)
