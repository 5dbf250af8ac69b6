"""Kineto's files are read in pieces: what they tell of kernels and collectives, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbench.bench.results.traced import CallFacts
from parbench.bench.text import UserError
from parbench.reports.traces import kineto
from parbench.reports.traces.kineto import RankTrace, files_of, read_rank
from tests.support.kineto_files import RankFile

MB = 1 << 20


def drawn(rank: int = 0) -> RankFile:
    """Two steps of 1 ms: a gathering that computing hides, then an all_reduce of which 200 us are exposed."""
    file = RankFile(rank, 2)
    for step in range(2):
        at = 1000.0 * step
        file.step(step, at, at + 1000)
        file.kernel(at + 100, at + 600)
        file.collective("_allgather_base", at + 200, at + 300, 2 * MB, [0, 1])
        file.collective("allreduce", at + 500, at + 800, MB, [0, 1])
        file.event("python_function", "train.py(3): step", at, at + 1000)
        file.event(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 850, at + 900, 7, correlation=1
        )
    return file


@pytest.fixture
def read(tmp_path: Path) -> RankTrace:
    return read_rank(drawn().write(tmp_path))


def test_kernels_collectives_and_copies_have_their_spans_and_facts(read: RankTrace) -> None:
    assert (read.source.rank, read.source.world_size, read.source.host, read.source.on_device) == (
        0,
        2,
        "node0",
        True,
    )
    assert [span for _, span in read.steps] == [(0, 1_000_000), (1_000_000, 2_000_000)]
    assert read.trace.compute[0] == (100_000, 600_000)
    assert read.trace.copies == [(850_000, 900_000), (1_850_000, 1_900_000)]
    assert read.trace.comm[:2] == [(200_000, 300_000), (500_000, 800_000)]
    gathered, reduced = read.trace.facts[:2]
    assert gathered == CallFacts("all_gather", "default_pg", (0, 1), 2, 8 * MB)  # what all end with
    assert reduced == CallFacts("all_reduce", "default_pg", (0, 1), 2, 4 * MB)
    assert read.trace.launched == [
        181_000,
        481_000,
        1_181_000,
        1_481_000,
    ]  # where c10d's operator is in it
    assert read.source.notes == ()


def test_a_file_is_read_alike_in_pieces_of_any_size_zipped_or_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: RankTrace
) -> None:
    file = drawn()
    file.event(
        "cpu_op", 'aten::odd "},\n  {" [name', 1, 2
    )  # a text that looks like the end of an event
    zipped = file.write(tmp_path, zipped=True)
    flat = tmp_path / "flat.json"
    flat.write_text(file.text().replace("\n", " "))
    for size in (100, 1000, 4096, 1 << 20):
        monkeypatch.setattr(kineto, "_BLOCK", size)
        for path in (zipped, flat):
            found = read_rank(path)
            assert (found.trace.comm, found.trace.facts) == (read.trace.comm, read.trace.facts), (
                size
            )
            assert found.steps == read.steps, size


def test_a_collective_is_what_its_kernel_is_where_its_call_is_joined_with_others(
    tmp_path: Path,
) -> None:
    """Of ranks that are cut short only how many there are is known; a step is marked on each stream."""
    text = drawn().text()
    for old, new in (
        ('"Collective name": "allreduce"', '"Collective name": "nccl:coalesced"'),
        (
            '"Collective name": "_allgather_base"',
            '"Collective name": "allgather_into_tensor_coalesced"',
        ),
        ('"Process Group Ranks": "[0, 1]"', '"Process Group Ranks": "[0, 1, ..., 7]"'),
        ('"Group size": 2', '"Group size": 8'),
        ('"pg_config": [', '"pg_config": ["all", '),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "rank0.json"
    on_stream = {"ph": "X", "cat": "gpu_user_annotation", "tid": 20, "dur": 100, "args": {}}
    marks = [
        {**on_stream, "name": f"ProfilerStep#{step}", "ts": 1000 * step + 200} for step in range(2)
    ]
    path.write_text(
        text.replace('"traceEvents": [', '"traceEvents": ' + json.dumps(marks)[:-1] + ",", 1)
    )
    found = read_rank(path)
    gathered, reduced = found.trace.facts[:2]
    assert (gathered, reduced) == (
        CallFacts("all_gather", "default_pg", None, 8, 8 * MB),
        CallFacts("all_reduce", "default_pg", None, 8, 4 * MB),
    )
    assert [span for _, span in found.steps] == [(0, 1_000_000), (1_000_000, 2_000_000)]
    assert found.source.rank == 0


def test_a_truncated_file_gives_what_is_whole_and_says_so(tmp_path: Path, read: RankTrace) -> None:
    text = drawn().text()
    cut = tmp_path / "rank0.json"
    cut.write_text(text[: text.index('"gpu_memcpy"', len(text) // 2) - 40])
    found = read_rank(cut)
    assert found.trace.comm == read.trace.comm
    assert found.source.notes[0] == "the file ends within an event: what comes after is missing"
    whole = drawn().write(tmp_path, zipped=True)
    short = tmp_path / "short.json.gz"
    short.write_bytes(whole.read_bytes()[:-400])
    assert read_rank(short).source.notes[0].startswith("the file ends within")


def test_an_event_that_is_odd_costs_that_event(tmp_path: Path, read: RankTrace) -> None:
    file = drawn()
    odd: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": "mm", "ts": "soon"},
        3,
        {"name": [], "args": "none"},
    ]
    file.events[4:4] = odd
    found = read_rank(file.write(tmp_path))
    assert found.trace.comm == read.trace.comm
    assert found.source.notes == ("3 events are not as the profiler writes them, and left out",)
    still = RankFile(0, 1)
    still.event("cpu_op", "aten::mm", 5, 5)
    with pytest.raises(UserError, match="holds nothing that lasts"):
        read_rank(still.write(tmp_path))


def test_what_is_no_trace_is_said_in_one_sentence(tmp_path: Path) -> None:
    texts = {
        "empty.json": "",
        "other.json": '{"cases": []}',
        "list.json": "[1, 2, 3]",
        "none.json": '{"traceEvents": []}',
        "words.json": "the wrong file",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path} (is no trace|holds no)"):
            read_rank(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        read_rank(tmp_path / "missing.json")
    with pytest.raises(
        UserError, match=r"holds no trace: allowed are files that end in .json or .json.gz"
    ):
        files_of([empty])


def test_a_rank_is_told_by_its_file_by_its_name_or_by_its_place(tmp_path: Path) -> None:
    text = drawn().text().replace('"distributedInfo"', '"other"')
    for name, place, rank, why in (("job_rank3.json", 0, 3, "name"), ("trace.json", 5, 5, "place")):
        (tmp_path / name).write_text(text)
        found = read_rank(tmp_path / name, place)
        assert (found.source.rank, found.source.notes) == (
            rank,
            (f"the file does not tell its rank: {rank} by its {why}",),
        )


def test_without_marked_steps_all_is_one(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(drawn().text().replace("ProfilerStep#", "Other#"))
    found = read_rank(path)
    assert [name for name, _ in found.steps] == ["all"]
    assert "no step is marked" in found.source.notes[0]
