"""Files of Kineto are read, and what is missing or odd is noted."""

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
    """Return spans relative to the origin of the file's times."""
    return [(start - BASE_NS, stop - BASE_NS) for start, stop in spans]


def list_facts(rank: TracedRank) -> list[CallFacts]:
    return [call.facts for call in rank.calls]


def list_operations(rank: TracedRank) -> list[str]:
    return [facts.op for facts in list_facts(rank)]


def test_kernels_collectives_and_copies_are_read(trace: TracedRank) -> None:
    assert (trace.rank, trace.world_size, trace.host) == (0, 2, "node0")
    assert trace.has_device
    spans = [step.step for step in trace.steps]
    assert shift(spans) == [(0, 1_000_000), (1_000_000, 2_000_000)]
    step = trace.steps[0]
    assert shift(step.compute) == [(100_000, 600_000)]
    assert shift(step.copies) == [(850_000, 900_000)]
    calls = [call.span for call in step.calls]
    assert shift(calls) == [(200_000, 300_000), (500_000, 800_000)]
    # The bytes of an all_gather are those that each rank ends with.
    all_gather, all_reduce = list_facts(trace)[:2]
    assert all_gather == CallFacts("all_gather", "default_pg", (0, 1), 2, 8 * MB)
    assert all_reduce == CallFacts("all_reduce", "default_pg", (0, 1), 2, 4 * MB)


def edit_first_call(**args: Any) -> str:
    """Return the text of a file whose first all_reduce has another kernel or arguments."""
    file = make_file()
    call, _ = [event for event in file.events if "AllReduce" in event["name"]]
    call["name"] = args.pop("kernel", call["name"])
    for name, value in args.items():
        call["args"][name.replace("_", " ")] = value
    return file.text()


@pytest.mark.parametrize(
    ("args", "op"),
    [
        ({"Collective_name": "nccl:coalesced"}, "all_reduce"),
        ({"kernel": "ncclDevKernel_Generic_1"}, "all_reduce"),
        ({"Collective_name": "", "kernel": "ncclDevKernel_Generic_1"}, "communication"),
        ({"Collective_name": "", "kernel": "ncclSymkDevKernel_AllGather_LL"}, "all_gather"),
    ],
)
def test_operation_is_read_from_call_or_kernel(
    tmp_path: Path, args: dict[str, str | None], op: str
) -> None:
    assert list_operations(read_text(tmp_path, edit_first_call(**args)))[1] == op


def test_shortened_ranks_leave_the_group_size(tmp_path: Path) -> None:
    """Kineto shortens long lists of ranks."""
    text = edit_first_call(Process_Group_Ranks="[0, 1, ..., 7]", Group_size=8)
    facts = list_facts(read_text(tmp_path, text))[1]
    assert facts == CallFacts("all_reduce", "default_pg", None, 8, 4 * MB)


def test_gzip_file_is_read(tmp_path: Path, trace: TracedRank) -> None:
    archive = make_file().write(tmp_path, zipped=True)
    assert read_rank(archive).steps == trace.steps
    archive.write_bytes(archive.read_bytes()[:-400])
    assert "is not a trace" in usage_error(read_rank, archive)


@pytest.mark.parametrize(
    "text", ["", "[1, 2, 3]", '{"traceEvents": []}', make_file().text()[:-400]]
)
def test_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=str(tmp_path / "rank0.json")):
        read_text(tmp_path, text)


def test_timeline_of_parbench_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "tid": 1}'
    path.write_text(f'{{"traceEvents": [{event}], "otherData": {{"parbench": "0.2.0"}}}}')
    assert "timeline that parbench exported" in usage_error(read_rank, path)


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


def make_kernel_file(kernel: str) -> RankFile:
    """Return a step of 100 us with one kernel."""
    file = RankFile(0, 2)
    file.step(0, 0.0, 100.0)
    file.event("kernel", kernel, 10.0, 50.0, 7, correlation=1)
    return file


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16, 8>(int)", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__half, 8>(int)", "all_reduce"),
        ("void deep_ep::internode_ll::dispatch<true, 3>(int)", "all_to_all"),
        ("void (anonymous namespace)::multimem_all_gather(int)", "all_gather"),
        ("void reduce_kernel<512, 1, all_reduce>(int)", None),
    ],
)
def test_kernels_communicate_without_nccl(tmp_path: Path, kernel: str, op: str | None) -> None:
    trace = read_rank(make_kernel_file(kernel).write(tmp_path))
    assert list_operations(trace) == ([op] if op else [])


def test_folder_without_traces_is_refused(tmp_path: Path) -> None:
    assert "contains no trace" in usage_error(list_trace_files, [tmp_path])
    path = make_file().write(tmp_path)
    assert list_trace_files([tmp_path]) == [path]
