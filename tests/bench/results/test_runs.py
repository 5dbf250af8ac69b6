"""Run folders: made whole or not at all, written by one process, read back as they were written, steps included."""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parbench.bench.machine.world_spec import WorldSpec
from parbench.bench.plan.cases import make_case
from parbench.bench.plan.catalogue import DEFINITIONS
from parbench.bench.plan.options import Options, make_plan
from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import (
    SCHEMA,
    Interval,
    RankTimeline,
    Record,
    Samples,
    Timeline,
    WorldInfo,
    encode,
    encode_timeline,
)
from parbench.bench.results.runs import (
    FOLDERS,
    RecordWriter,
    create_run,
    load_run,
    load_timeline,
    open_writer,
    trace_name,
    utc_now,
    whole,
    write_info,
)
from tests.support.paths import environment
from tests.support.refusals import usage_error


def make_record(launch: int = 0) -> Record:
    return Record(
        case=make_case(
            "collective.all_reduce",
            "parbench.bench.operations.collectives:all_reduce",
            {"size_bytes": 1024},
        ),
        world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
        launch=launch,
        status="ok",
        samples=Samples(values=[0.001, 0.002]),
        started=utc_now(),
        seconds=0.5,
    )


@pytest.fixture
def plan() -> Plan:
    return make_plan(
        Options(preset="smoke"), DEFINITIONS, WorldSpec(nproc=4, backend="gloo", device="cpu")
    )


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    return create_run(tmp_path / "runs", plan, "0.1.0")[0]


def not_writable(run: Path) -> str:
    return usage_error(open_writer(run).__enter__)


# --- made ---


def test_a_new_run_has_its_folders_no_records_and_what_was_asked(
    tmp_path: Path, plan: Plan
) -> None:
    path, info = create_run(tmp_path / "deep" / "runs", plan, "0.1.0")
    assert sorted(entry.name for entry in path.iterdir()) == sorted(
        [*FOLDERS, "records.jsonl", "run.json"]
    )
    read = load_run(path)
    assert (read.path, read.info, read.records) == (path, info, ())
    assert (info.plan, info.parbench, info.environment, info.schema) == (
        plan,
        "0.1.0",
        None,
        SCHEMA,
    )
    assert path.name == info.id
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{re.escape(info.host)}-[0-9a-f]{{6}}", path.name)
    assert create_run(tmp_path / "deep" / "runs", plan, "0.1.0")[0] != path, "of the same second"


def test_the_environment_is_added_later_to_json_that_a_person_can_read(run: Path) -> None:
    added = msgspec.structs.replace(
        load_run(run).info, environment={"versions": {"torch": "2.13.0"}, "gpu": None}
    )
    write_info(run, added)
    assert load_run(run).info == added
    assert not list(run.glob(".*"))
    text = (run / "run.json").read_text()
    assert json.loads(text)["plan"]["preset"] == "smoke"
    assert text.count("\n") > 10


def test_a_place_that_cannot_hold_a_run_is_refused_with_the_reason_and_a_way_out(
    tmp_path: Path, plan: Plan
) -> None:
    (tmp_path / "file").touch()
    places = {
        Path("/proc/runs"): "",
        Path("/dev/null/runs"): "Not a directory",
        tmp_path / "file": "Not a directory",
    }
    for place, reason in places.items():
        told = usage_error(create_run, place, plan, "0.1.0")
        assert told.startswith(f"--out {place} cannot hold a run: {reason}")
        assert told.endswith("; choose another folder with --out")


def test_a_full_disk_is_refused_before_anything_runs_and_leaves_nothing_behind(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def full(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    told = usage_error(create_run, tmp_path, plan, "0.1.0")
    assert told.startswith(
        f"--out {tmp_path} cannot hold a run: the disk is full (8 MB are needed); free some"
    )
    assert (sizes, list(tmp_path.iterdir())) == ([8 << 20], [])


# --- written ---


def test_records_are_read_back_in_the_order_written_as_soon_as_each_is_on_disk(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    records = tuple(make_record(launch) for launch in range(3))
    for done, record in enumerate(records[:2], start=1):
        with open_writer(run) as writer:  # one that is opened again goes on after what is there
            writer.write(record)
            assert load_run(run).records == records[:done]
            assert synced.pop() == (run / "records.jsonl").stat().st_size
    with open_writer(run) as writer:
        writer.write(records[2])
        writer.write_file("samples/case-0.npz", b"content")
    assert load_run(run).records == records
    assert (run / "samples" / "case-0.npz").read_bytes() == b"content"


def test_a_line_cut_short_at_any_byte_is_taken_off_before_the_next_is_written(run: Path) -> None:
    file = run / "records.jsonl"
    first, third = make_record(0), make_record(2)
    before, last = encode(first), encode(make_record(1))
    for kept, cuts in ((before, range(len(last))), (b"", range(0, len(last), 10))):
        for length in cuts:
            file.write_bytes(kept + last[:length])
            with open_writer(run):
                assert file.read_bytes() == kept, length
    file.write_bytes(before + last[:10])
    with open_writer(run) as writer:
        writer.write(third)
    assert load_run(run).records == (first, third)


def test_a_disk_that_fills_up_ends_in_words(run: Path) -> None:
    class Partial(BytesIO):
        def write(self, content: Any, /) -> int:
            return len(content) - 1

    (run / "samples" / "a.npz").symlink_to("/dev/full")
    with Path("/dev/full").open("r+b", buffering=0) as full:
        for file in (full, Partial()):
            told = usage_error(RecordWriter(file, run).write, make_record())
            assert told == f"{run}/records.jsonl takes no more records: No space left on device"
        told = usage_error(RecordWriter(full, run).write_file, "samples/a.npz", bytes(1 << 16))
    assert told == f"{run}/samples/a.npz cannot be written: No space left on device"


def test_only_one_process_writes_while_others_may_read_until_it_is_killed(run: Path) -> None:
    code = "import sys; from pathlib import Path; from parbench.bench.results.runs import open_writer\n"
    code += "with open_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(run)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert load_run(run).records == ()
            (run / "records.jsonl").write_bytes(b'{"half')
            assert (
                not_writable(run)
                == f"{run} is being written by another process; wait until it ends"
            )
            assert (run / "records.jsonl").read_bytes() == b'{"half', (
                "nothing is taken off what it is writing"
            )
        finally:
            process.kill()
    with open_writer(run) as writer:
        writer.write(make_record())
    assert len(load_run(run).records) == 1


def test_a_writer_that_ended_lets_the_next_one_in_even_after_an_error(run: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), open_writer(run):
        raise RuntimeError("mine")
    with open_writer(run):
        pass


def test_what_cannot_be_locked_or_is_gone_is_refused_in_words(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    (run / "samples").rmdir()
    with open_writer(run) as writer:
        assert "a.npz cannot be written: No such file" in usage_error(
            writer.write_file, "samples/a.npz", b""
        )
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", no_locks)
        assert not_writable(run).endswith(
            "cannot be locked: Function not implemented; choose another folder with --out"
        )
    (run / "records.jsonl").unlink()
    assert "records.jsonl cannot be read: No such file" in usage_error(load_run, run)
    assert "records.jsonl cannot be written: No such file" in not_writable(run)


# --- read ---


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert usage_error(load_run, tmp_path / "absent") == f"no such folder: {tmp_path / 'absent'}"
    for name in (".", "file"):
        assert "is no run: it holds no readable run.json" in usage_error(
            load_run, tmp_path / name
        ), name
    for name in ("b", "c", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    assert (
        usage_error(load_run, tmp_path)
        == f"{tmp_path} is no run: it holds 3 runs, the newest is {tmp_path / 'c'}"
    )


def test_a_run_file_that_parbench_did_not_write_is_refused_with_the_fault(run: Path) -> None:
    file = run / "run.json"
    whole = file.read_bytes().rstrip()
    faults = {
        b"[]": "Expected `object`, got `array`",
        b"{}": "missing required field `schema`",
        b'{"schema": 2}': "missing required field `id`",
        b'{"schema": "1"}': "Expected `int`, got `str` - at `$.schema`",
        b'{"schema": 2, "id": "\xff"}': "codec can't decode",
    }
    for content, words in {
        **faults,
        **{whole[:length]: "" for length in range(0, len(whole), 97)},
    }.items():
        file.write_bytes(content)
        told = usage_error(load_run, run)
        assert told.startswith(f"{file} is not what parbench wrote: "), content
        assert words in told


def test_a_bad_record_costs_its_line_alone_and_a_file_of_nothing_else_is_refused(run: Path) -> None:
    (run / "records.jsonl").write_bytes(
        encode(make_record()) + b"{}\n" + encode(make_record(launch=1))
    )
    found = load_run(run)
    assert [record.launch for record in found.records] == [0, 1]
    assert found.damaged[0].startswith(f"{run}/records.jsonl, line 2 is no record: ")
    assert usage_error(whole, found) == found.damaged[0]
    for noise in (b"7", b'{"grade": []}', b"{}"):  # of a version whose grades had other names
        (run / "records.jsonl").write_bytes(b'{"schema": 2, "noise": ' + noise + b"}\n")
        assert usage_error(load_run, run).startswith(f"{run}/records.jsonl, line 1 is no record"), (
            noise
        )


# --- one step of all ranks ---

INTERVALS = (Interval("comm dp", "all_reduce", 2.0, 4.25), Interval("compute", "compute", 1.0, 3.0))
TIMELINE = Timeline(
    clock="one host, one monotonic clock",
    uncertainty_seconds=0.0,
    ranks=tuple(
        RankTimeline(rank=rank, start_us=0.5 * rank, stop_us=10.0, intervals=INTERVALS)
        for rank in range(2)
    ),
)


def test_a_timeline_lies_beside_its_record_and_one_that_is_damaged_is_named(run: Path) -> None:
    record = make_record()
    with open_writer(run) as writer:
        writer.write(record)
        writer.write_file(trace_name(record), encode_timeline(TIMELINE))
    read = load_run(run)
    assert load_timeline(read, record) == TIMELINE
    assert load_timeline(read, make_record(launch=1)) is None
    file = run / trace_name(record)
    file.write_bytes(b"no timeline")
    assert usage_error(load_timeline, read, record).startswith(
        f"{file} is not what parbench wrote: "
    )
    file.unlink()
    file.mkdir()
    assert usage_error(load_timeline, read, record) == f"{file} cannot be read: Is a directory"


def test_the_same_timeline_is_the_same_bytes_and_plain_json() -> None:
    content = encode_timeline(TIMELINE)
    assert content == encode_timeline(TIMELINE)
    assert content[4:8] == bytes(4), "gzip's header holds no time"
    [first, _] = json.loads(gzip.decompress(content))["ranks"]
    assert first["intervals"] == [
        ["comm dp", "all_reduce", 2.0, 4.25],
        ["compute", "compute", 1.0, 3.0],
    ]
