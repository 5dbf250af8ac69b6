"""Files of Kineto become the steps of a rank, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.spans import Span
from parbench.bench.results.step_trace import CallFacts
from parbench.bench.text import UserError
from parbench.reports.traces.job import join_ranks
from parbench.reports.traces.rank_trace import TracedRank, list_trace_files, read_rank
from tests.support.refusals import usage_error
from tests.support.reports.kineto_files import RankFile

MB = 1 << 20
BASE_NS = 1_700_000_000_000_000_000
"""The origin of the times in a ``RankFile``."""


def make_file() -> RankFile:
    """Return two steps of 1 ms: a hidden all_gather, and an all_reduce exposed for 200 us."""
    file = RankFile(0, 2)
    for start in (0.0, 1000.0):
        file.step(int(start / 1000), start, start + 1000)
        file.kernel(start + 100, start + 600)
        file.collective("_allgather_base", start + 200, start + 300, 2 * MB)
        file.collective("allreduce", start + 500, start + 800, MB)
        file.event("python_function", "train.py(3): step", start, start + 1000)
        file.event("gpu_memcpy", "Memcpy HtoD", start + 850, start + 900, 7, correlation=1)
    return file


@pytest.fixture
def trace(tmp_path: Path) -> TracedRank:
    return read_rank(make_file().write(tmp_path))


def read_text(folder: Path, text: str, name: str = "rank0.json") -> TracedRank:
    path = folder / name
    path.write_text(text)
    return read_rank(path)


def shift(spans: list[Span]) -> list[Span]:
    """Return spans in us relative to the origin of the file's times."""
    return [((start - BASE_NS) // 1000, (stop - BASE_NS) // 1000) for start, stop in spans]


def test_kernels_collectives_and_copies_are_read(trace: TracedRank) -> None:
    assert (trace.rank, trace.world_size, trace.host) == (0, 2, "node0")
    assert trace.has_device
    assert shift([step.step for step in trace.steps]) == [(0, 1000), (1000, 2000)]
    step = trace.steps[0]
    assert shift(step.compute) == [(100, 600)]
    assert shift(step.copies) == [(850, 900)]
    assert shift([call.span for call in step.calls]) == [(200, 300), (500, 800)]
    # The bytes of an all_gather are those that each rank ends with.
    all_gather, all_reduce = step.calls
    assert all_gather.facts == CallFacts("all_gather", "default_pg", (0, 1), 2, 8 * MB)
    assert all_reduce.facts == CallFacts("all_reduce", "default_pg", (0, 1), 2, 4 * MB)


def read_call(folder: Path, kernel: str | None = None, **args: Any) -> CallFacts:
    """Return the facts of the first all_reduce, with another kernel or other arguments."""
    file = make_file()
    call = next(event for event in file.events if "AllReduce" in event["name"])
    call["name"] = kernel or call["name"]
    for name, value in args.items():
        call["args"][name.replace("_", " ")] = value
    return read_text(folder, file.text()).steps[0].calls[1].facts


@pytest.mark.parametrize(
    ("name", "kernel", "op"),
    [
        ("nccl:coalesced", None, "all_reduce"),
        ("allreduce", "ncclDevKernel_Generic_1", "all_reduce"),
        ("", "ncclDevKernel_Generic_1", "communication"),
        ("", "ncclSymkDevKernel_AllGather_LL", "all_gather"),
        ("", "void multimem_all_reduce_kernel<c10::BFloat16, 16, 8>(int)", "all_reduce"),
        ("", "void deep_ep::internode_ll::dispatch<true, 3>(int)", "all_to_all"),
    ],
)
def test_operation_is_read_from_call_or_kernel(
    tmp_path: Path, name: str, kernel: str | None, op: str
) -> None:
    assert read_call(tmp_path, kernel, Collective_name=name).op == op


@pytest.mark.parametrize(
    ("name", "stop", "op"),
    [
        ("nccl:all_to_all", 700.0, "all_to_all"),
        ("nccl:all_to_all", 480.0, "sendrecv"),
        ("nccl:coalesced", 700.0, "sendrecv"),
    ],
)
def test_operation_is_read_from_the_range_of_the_launch(
    tmp_path: Path, name: str, stop: float, op: str
) -> None:
    file = RankFile(0, 2)
    file.collective("send", 500, 800, MB)
    del file.events[-1]["args"]["Collective name"]
    file.event("user_annotation", name, 470, stop)
    assert [call.facts.op for call in read_rank(file.write(tmp_path)).calls] == [op]


def test_kernel_named_after_a_collective_in_its_template_computes(tmp_path: Path) -> None:
    text = make_file().text().replace("sm90_xmma", "void reduce_kernel<512, all_reduce>(int)")
    assert len(read_text(tmp_path, text).steps[0].calls) == 2


@pytest.mark.parametrize(("shape", "num_bytes"), [([[64], [192]], 2048), ([], 8)])
def test_gloo_call_has_the_bytes_of_its_shapes(
    tmp_path: Path, shape: list[object], num_bytes: int
) -> None:
    """The bytes of an all_gather are those of all ranks of the only group."""
    file = RankFile(0, 2)
    file.event("user_annotation", "ProfilerStep#1", 0, 100)
    shapes = {"Input Dims": [shape, []], "Input type": ["float", ""]}
    file.event("user_annotation", "gloo:all_gather", 20, 50, 2, **shapes)
    (call,) = read_rank(file.write(tmp_path)).calls
    assert call.facts == CallFacts("all_gather", None, (0, 1), 2, num_bytes)


def test_shortened_ranks_leave_the_group_size(tmp_path: Path) -> None:
    """Kineto shortens long lists of ranks."""
    facts = read_call(tmp_path, Process_Group_Ranks="[0, 1, ..., 7]", Group_size=8)
    assert facts == CallFacts("all_reduce", "default_pg", None, 8, 4 * MB)


def test_gzip_file_is_read(tmp_path: Path, trace: TracedRank) -> None:
    archive = make_file().write(tmp_path, zipped=True)
    assert read_rank(archive).steps == trace.steps
    archive.write_bytes(archive.read_bytes()[:-400])
    assert "is not a trace" in usage_error(read_rank, archive)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a trace"),
        ("[1, 2, 3]", "is not a trace"),
        (make_file().text()[:-400], "is not a trace"),
        ('{"traceEvents": []}', "contains no operator"),
        ('{"traceEvents": [], "otherData": {"parbench": "0.2"}}', "parbench exported"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"rank0\.json.*{problem}"):
        read_text(tmp_path, text)


def test_rank_is_read_from_the_file_name(tmp_path: Path) -> None:
    document = json.loads(make_file().text())
    del document["distributedInfo"]
    assert read_text(tmp_path, json.dumps(document), "job_rank3.json").rank == 3


def test_trace_without_steps_is_one_step(tmp_path: Path) -> None:
    trace = read_text(tmp_path, make_file().text().replace("ProfilerStep#", "Other#"))
    assert [step.name for step in trace.steps] == ["all"]
    assert "no step is marked" in join_ranks([trace]).notes[0]


def test_infinite_number_loses_no_event(tmp_path: Path, trace: TracedRank) -> None:
    text = make_file().text()
    infinite = text.replace('"correlation": 1\n', '"correlation": 1, "GB/s": -Infinity\n')
    assert infinite != text
    assert read_text(tmp_path, infinite).steps == trace.steps


def test_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iteration_10").mkdir()
    make_file().write(tmp_path / "iteration_10")
    with pytest.raises(UserError, match="contains no trace") as error:
        list_trace_files([tmp_path])
    assert error.value.hint == f"choose one folder: {tmp_path / 'iteration_10'}"
    path = make_file().write(tmp_path)
    assert list_trace_files([tmp_path]) == [path]
