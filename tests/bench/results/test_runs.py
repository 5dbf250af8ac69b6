"""Run folders: complete or absent, written by one process, read back as written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parbench.bench.plan.plan import Plan
from parbench.bench.results.records import (
    Record,
    encode_record,
)
from parbench.bench.results.runs import (
    FOLDERS,
    RecordWriter,
    create_run,
    load_run,
    load_timeline,
    make_trace_path,
    open_writer,
)
from tests.support.paths import environment
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import collective_case, make_plan, ok_record

PLAN: Plan = make_plan([collective_case()])


def make_record(repetition: int = 0) -> Record:
    return ok_record(collective_case(), repetition, n=2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path / "runs", PLAN, "0.1.0")[0]


def test_new_run_has_folders_plan_and_no_records(tmp_path: Path) -> None:
    path, info = create_run(tmp_path / "deep" / "runs", PLAN, "0.1.0")
    names = sorted(entry.name for entry in path.iterdir())
    assert names == sorted([*FOLDERS, "records.jsonl", "run.json"])
    run = load_run(path)
    assert run.info == info
    assert run.records == ()
    assert info.plan == PLAN
    assert path.name == info.id


def test_unusable_output_folder_is_refused(tmp_path: Path) -> None:
    assert "--out /proc/runs" in usage_error(create_run, Path("/proc/runs"), PLAN, "0.1.0")


def test_records_are_on_disk_in_the_order_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_sizes: list[int] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced_sizes.append(os.fstat(descriptor).st_size)
    )
    records = tuple(make_record(repetition) for repetition in range(3))
    with open_writer(run) as writer:
        writer.write(records[0])
        assert load_run(run).records == records[:1]
        assert synced_sizes[-1] == (run / "records.jsonl").stat().st_size
    with open_writer(run) as writer:
        writer.write(records[1])
        writer.write(records[2])
        writer.write_file("samples/case-0.npz", b"content")
    assert load_run(run).records == records
    assert (run / "samples" / "case-0.npz").read_bytes() == b"content"


def test_line_cut_short_is_removed_by_the_writer(run: Path) -> None:
    line = encode_record(make_record())
    (run / "records.jsonl").write_bytes(line + line[:29])
    with open_writer(run):
        assert (run / "records.jsonl").read_bytes() == line


def test_disk_that_fills_up_is_reported(run: Path) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as full_file:
        message = usage_error(RecordWriter(full_file, run).write, make_record())
    assert f"{run}/records.jsonl" in message
    assert "No space left on device" in message


HOLD_RUN = """
import sys
from pathlib import Path
from parbench.bench.results.runs import open_writer
with open_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_process_writes_until_it_is_killed(run: Path) -> None:
    command = [sys.executable, "-c", HOLD_RUN, str(run)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            assert load_run(run).records == ()
            (run / "records.jsonl").write_bytes(b'{"partial')
            assert usage_error(open_writer(run).__enter__).endswith("wait until it ends")
            assert (run / "records.jsonl").read_bytes() == b'{"partial'
        finally:
            process.kill()
    with open_writer(run) as writer:
        writer.write(make_record())
    assert len(load_run(run).records) == 1


def test_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert f"{path} is not a run" in usage_error(load_run, path)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b'{"schema": 2}', "`id`"),
        (b'{"schema": 2, "id": "\xff"}', "decode"),
    ],
)
def test_damaged_run_file_is_refused(run: Path, content: bytes, fact: str) -> None:
    file = run / "run.json"
    file.write_bytes(content)
    message = usage_error(load_run, run)
    assert str(file) in message
    assert fact in message


def test_bad_record_is_refused(run: Path) -> None:
    (run / "records.jsonl").write_bytes(encode_record(make_record()) + b"{}\n")
    assert "line 2 is not a record" in usage_error(load_run, run)


def test_timeline_is_absent_or_refused(run: Path) -> None:
    record = make_record()
    loaded_run = load_run(run)
    assert load_timeline(loaded_run, record) is None
    file = run / make_trace_path(record)
    file.write_bytes(b"no timeline")
    assert str(file) in usage_error(load_timeline, loaded_run, record)
