"""Steps of a job: its ranks, common steps and clocks, and agreement with parbench's own probe."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import record_function

from parbench.bench.results.spans import compute_breakdown
from parbench.bench.results.step_trace import STEP, build_host_trace
from parbench.bench.text import UserError
from parbench.bench.world.world import World
from parbench.reports.traces.job import join_ranks, read_job
from parbench.reports.traces.rank_trace import TracedRank, read_rank
from parbench.workloads.probes.overlap import match_spans_to_calls
from parbench.workloads.probes.sent_bytes import record_calls
from parbench.workloads.torch_internals import open_profiler, trace_events
from tests.support.ranks import Ranks
from tests.support.reports.drawn_steps import MB, draw_late_rank, make_job
from tests.support.reports.kineto_files import RankFile
from tests.support.workloads.training_steps import build_small_step


def read_drawn_rank(folder: Path, rank: int, durations_us: dict[int, int]) -> TracedRank:
    """Return the steps of one of four ranks, from the durations by number of its steps."""
    file = RankFile(rank, 4)
    for number, duration_us in durations_us.items():
        start = 10_000.0 * number
        file.step(number, start, start + duration_us)
        draw_late_rank(file, rank, start)
    return read_rank(file.write(folder))


def draw_queue(file: RankFile, rank: int, start: float) -> None:
    """Issue three all_reduces together, which run one after another, for 1 ms each."""
    for i in range(3):
        file.collective("allreduce", start + 6000 + i, start + 7000 + 1000 * i, MB)


def test_queued_time_is_not_transfer_time(tmp_path: Path) -> None:
    job = make_job(tmp_path, draw_queue, steps=1)
    assert [shared.transfer_ns for shared in job.shared_calls] == pytest.approx([1_000_000] * 3)


def test_steps_that_not_all_ranks_traced_are_left_out(tmp_path: Path) -> None:
    first = read_drawn_rank(tmp_path, 0, {1: 10_000, 2: 10_000})
    second = read_drawn_rank(tmp_path, 1, {2: 10_000, 3: 50_000})
    job = join_ranks([first, second])
    assert job.num_steps == 1
    assert job.step_seconds == pytest.approx(10e-3)


@pytest.mark.parametrize(("shift_ns", "num_notes"), [(0, 0), (10**9, 1)])
def test_ranks_of_different_jobs_are_noted(
    tmp_path: Path, shift_ns: int, num_notes: int
) -> None:
    first = read_drawn_rank(tmp_path, 0, {1: 10_000})
    second = read_drawn_rank(tmp_path, 1, {1: 10_000})
    (step,) = second.steps
    start, stop = step.step
    later = replace(step, step=(start + shift_ns, stop + shift_ns))
    job = join_ranks([first, replace(second, steps=(later,))])
    assert ["overlap in time" in note for note in job.notes] == [True] * num_notes


def test_ranks_without_a_common_step_are_refused(tmp_path: Path) -> None:
    first = read_drawn_rank(tmp_path, 0, {1: 10_000})
    second = read_drawn_rank(tmp_path, 1, {8: 10_000})
    with pytest.raises(UserError, match="no step in common"):
        join_ranks([first, second])


def trace_and_profile(
    world: World, name: str, params: dict[str, Any], folder: str
) -> dict[str, Any]:
    """Profile one step into a file, and return the breakdown of parbench's own probe."""
    step = build_small_step(world, name, params)
    for _ in range(2):
        step.reset()
        world.barrier()
        step.step()
    calls = record_calls(step.step, step.mesh.groups)
    step.reset()
    world.barrier()
    with open_profiler(world.device) as profiler, record_function(STEP):
        step.step()
    trace = build_host_trace(trace_events(profiler))
    profiler.export_chrome_trace(str(Path(folder) / f"rank{world.rank}.json"))
    step.close()
    comm = match_spans_to_calls(trace, calls).group_by_axis()
    return asdict(compute_breakdown(trace.step, trace.compute, comm, trace.copies))


def test_profiler_file_agrees_with_the_probe(two_ranks: Ranks, tmp_path: Path) -> None:
    probes = two_ranks.call(
        "tests.reports.traces.test_job:trace_and_profile",
        name="fsdp",
        params={"layers": 2, "compute": "simulated:10ms"},
        folder=str(tmp_path),
    )
    job = read_job([tmp_path])
    assert {shared.call.facts.size for shared in job.shared_calls} == {2}
    for rank, probe in zip(job.ranks, probes, strict=True):
        parts = rank.steps[0].parts
        approx = partial(pytest.approx, rel=0.05, abs=0.001 * parts.wall_seconds)
        exposed_seconds = sum(probe["exposed_comm_seconds"].values())
        assert parts.compute_seconds == approx(probe["compute_seconds"])
        assert parts.exposed_seconds == approx(exposed_seconds)
        assert parts.idle_seconds == approx(probe["idle_seconds"])
