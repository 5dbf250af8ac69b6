"""Run folders: made whole or not at all, written by one process, read back as they were written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

import bench
from bench.cases import Setting, make_case
from bench.definitions import DEFINITIONS
from bench.errors import UserError
from bench.plan import Plan
from bench.planning import Request, make_plan
from bench.records import SCHEMA, Record, Samples, WorldInfo, encode
from bench.runs import (
    FOLDERS,
    create_run,
    load_info,
    load_run,
    load_timeline,
    open_writer,
    trace_name,
    utc_now,
    write_info,
)
from bench.timeline import Timeline, encode_timeline

ROOT = Path(str(bench.__file__)).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def make_record(launch: int = 0) -> Record:
    return Record(
        case=make_case("collective.all_reduce", "bench.collectives:all_reduce", {"size_bytes": 1024}),
        world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
        launch=launch,
        status="ok",
        samples=Samples(values=[0.001, 0.002]),
        started=utc_now(),
        seconds=0.5,
    )


@pytest.fixture
def plan() -> Plan:
    return make_plan(Request(preset="smoke"), DEFINITIONS, Setting(nproc=4, backend="gloo", device="cpu"))


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Path:
    return create_run(tmp_path / "runs", plan, "0.1.0")[0]


def test_now_is_utc_to_the_millisecond_and_reads_back() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())
    assert abs((datetime.fromisoformat(utc_now()) - datetime.now(UTC)).total_seconds()) < 5


def test_a_new_run_has_its_folders_no_records_and_what_was_asked(tmp_path: Path, plan: Plan) -> None:
    path, info = create_run(tmp_path / "deep" / "runs", plan, "0.1.0")
    assert sorted(entry.name for entry in path.iterdir()) == sorted([*FOLDERS, "records.jsonl", "run.json"])
    read = load_run(path)
    assert (read.path, read.info, read.records) == (path, info, ())
    assert (info.plan, info.parbench, info.environment, info.schema) == (plan, "0.1.0", None, SCHEMA)


def test_a_run_is_named_by_its_utc_time_host_and_a_random_end(tmp_path: Path, plan: Plan) -> None:
    path, info = create_run(tmp_path, plan, "0.1.0")
    assert path.name == info.id
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{re.escape(info.host)}-[0-9a-f]{{6}}", path.name)


def test_two_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, plan: Plan) -> None:
    assert create_run(tmp_path, plan, "0.1.0")[0] != create_run(tmp_path, plan, "0.1.0")[0]


def test_the_environment_is_added_later_and_what_was_asked_is_kept(run: Path) -> None:
    info = load_info(run)
    write_info(run, msgspec.structs.replace(info, environment={"torch": "2.13.0", "gpu": None}))
    assert load_info(run) == msgspec.structs.replace(info, environment={"torch": "2.13.0", "gpu": None})
    assert not (run / ".run.json").exists()


def test_the_run_file_is_json_that_a_person_can_read(run: Path) -> None:
    text = (run / "run.json").read_text()
    assert json.loads(text)["plan"]["preset"] == "smoke"
    assert text.count("\n") > 10


@pytest.mark.parametrize("place", ["/proc/runs", "/dev/null/runs", "/sys/runs"])
def test_a_place_that_cannot_hold_a_run_is_refused_with_the_reason_and_a_way_out(place: str, plan: Plan) -> None:
    with pytest.raises(UserError, match=rf"--out {place} cannot hold a run: .*choose another folder with --out"):
        create_run(Path(place), plan, "0.1.0")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="cannot hold a run: Not a directory"):
        create_run(tmp_path / "runs", plan, "0.1.0")


PREAMBLE = """
import sys
from pathlib import Path
from bench.cases import Setting
from bench.definitions import DEFINITIONS
from bench.planning import Request, make_plan
from bench.runs import create_run, load_run, open_writer, write_info
out = Path(sys.argv[1])
plan = make_plan(Request(preset="smoke"), DEFINITIONS, Setting(nproc=2, backend="gloo", device="cpu"))
"""


def on_a_disk(folder: Path, options: str, code: str) -> str:
    """Run code with ``out`` on a small disk of its own, seen by no other process; return what it prints."""
    mount = f"mount -t tmpfs -o {options} tmpfs {folder}"
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*private, mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("no private mounts here (unshare --map-root-user --mount)")
    done = subprocess.run(
        [*private, f'{mount} && exec "$@"', "sh", sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_refused_before_anything_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = on_a_disk(
        tmp_path,
        "size=4m",
        """
        try:
            create_run(out / "runs", plan, "0.1.0")
        except ValueError as error:
            print(type(error).__name__, error, list((out / "runs").iterdir()))
        """,
    )
    assert words.startswith("UserError")
    assert f"--out {tmp_path}/runs cannot hold a run: the disk is full (8 MB are needed); free some" in words
    assert words.endswith("[]\n")


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    words = on_a_disk(
        tmp_path,
        "ro",
        """
        try:
            create_run(out / "runs", plan, "0.1.0")
        except ValueError as error:
            print(type(error).__name__, error)
        """,
    )
    assert words.startswith(f"UserError --out {tmp_path}/runs cannot hold a run: Read-only file system")


def test_a_disk_that_fills_up_later_ends_in_words_and_loses_only_the_record_in_flight(tmp_path: Path) -> None:
    words = on_a_disk(
        tmp_path,
        "size=9m",
        """
        import msgspec
        from bench.cases import make_case
        from bench.records import Record, Samples, WorldInfo
        record = Record(
            case=make_case("n", "t:f", {}), world=WorldInfo(size=2, nodes=1, backend="gloo", device="cpu"),
            launch=0, status="ok", samples=Samples(values=[0.1] * 3000), started="", seconds=1.0,
        )
        path, info = create_run(out, plan, "0.1.0")
        def attempt(action):
            try:
                action()
            except ValueError as error:
                print(type(error).__name__, error)
        with open_writer(path) as writer:
            writer.write(record)
            (out / "fill").write_bytes(bytes(8 << 20))
            with (out / "rest").open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
            attempt(lambda: writer.write(record))
            attempt(lambda: writer.write_samples("a.npz", bytes(1 << 16)))
        print(load_run(path).records == (record,))
        (out / "fill").unlink()
        with open_writer(path) as writer:
            writer.write(record)
        print(load_run(path).records == (record, record))
        """,
    ).splitlines()
    assert re.fullmatch(r"UserError \S+/records\.jsonl takes no more records: No space left on device", words[0])
    assert re.fullmatch(r"UserError \S+/samples/a\.npz cannot be written: No space left on device", words[1])
    assert words[2:] == ["True", "True"]


def test_records_are_read_back_in_the_order_written(run: Path) -> None:
    records = tuple(make_record(launch) for launch in range(3))
    with open_writer(run) as writer:
        for record in records:
            writer.write(record)
    assert load_run(run).records == records


def test_a_record_can_be_read_as_soon_as_it_is_written(run: Path) -> None:
    with open_writer(run) as writer:
        writer.write(make_record(0))
        assert len(load_run(run).records) == 1
        writer.write(make_record(1))
        assert len(load_run(run).records) == 2


def test_a_record_is_synced_to_disk_before_the_next_case_begins(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: sizes_synced.append(os.fstat(descriptor).st_size))
    record = make_record()
    with open_writer(run) as writer:
        writer.write(record)
        assert sizes_synced == [len(encode(record))]


def test_writing_again_goes_on_after_what_is_there(run: Path) -> None:
    for launch in range(2):
        with open_writer(run) as writer:
            writer.write(make_record(launch))
    assert [record.launch for record in load_run(run).records] == [0, 1]


def test_a_line_cut_short_at_any_byte_is_taken_off_before_the_next_is_written(run: Path) -> None:
    file = run / "records.jsonl"
    first, second, third = make_record(0), make_record(1), make_record(2)
    last = encode(second)
    for length in range(len(last)):
        file.write_bytes(encode(first) + last[:length])
        with open_writer(run):
            assert file.read_bytes() == encode(first)
    with open_writer(run) as writer:
        writer.write(third)
    assert load_run(run).records == (first, third)


def test_a_first_line_cut_short_is_taken_off_too(run: Path) -> None:
    (run / "records.jsonl").write_bytes(encode(make_record())[:10])
    with open_writer(run):
        assert (run / "records.jsonl").read_bytes() == b""


def test_a_whole_last_line_stays(run: Path) -> None:
    record = make_record()
    (run / "records.jsonl").write_bytes(encode(record))
    with open_writer(run):
        pass
    assert load_run(run).records == (record,)


def test_raw_samples_are_kept_beside_the_records(run: Path) -> None:
    with open_writer(run) as writer:
        writer.write_samples("case-0.npz", b"content")
    assert (run / "samples" / "case-0.npz").read_bytes() == b"content"


def test_samples_whose_folder_is_gone_are_refused_in_words(run: Path) -> None:
    (run / "samples").rmdir()
    with open_writer(run) as writer, pytest.raises(UserError, match=r"a\.npz cannot be written: No such file"):
        writer.write_samples("a.npz", b"")


@contextmanager
def another_writer(run: Path) -> Iterator[subprocess.Popen[str]]:
    code = "with open_writer(out): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", PREAMBLE + code, str(run)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_only_one_process_writes_and_others_may_read(run: Path) -> None:
    with another_writer(run):
        with pytest.raises(UserError, match=rf"{run} is being written by another process; wait until it ends"):
            open_writer(run).__enter__()
        assert load_run(run).records == ()


def test_being_refused_takes_nothing_off_what_the_other_process_is_writing(run: Path) -> None:
    with another_writer(run):
        (run / "records.jsonl").write_bytes(b'{"half')
        with pytest.raises(UserError, match="another process"):
            open_writer(run).__enter__()
        assert (run / "records.jsonl").read_bytes() == b'{"half'


def test_a_process_that_was_killed_holds_no_lock(run: Path) -> None:
    with another_writer(run) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open_writer(run) as writer:
            writer.write(make_record())
    assert len(load_run(run).records) == 1


def test_a_writer_that_ended_lets_the_next_one_in_even_after_an_error(run: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), open_writer(run):
        raise RuntimeError("mine")
    with open_writer(run):
        pass


def test_a_file_system_without_locks_is_refused_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match="cannot be locked: Function not implemented; choose another folder with --out"):
        open_writer(run).__enter__()


def test_a_folder_without_records_can_be_neither_read_nor_written(run: Path) -> None:
    (run / "records.jsonl").unlink()
    with pytest.raises(UserError, match=r"records\.jsonl cannot be read: No such file"):
        load_run(run)
    with pytest.raises(UserError, match=r"records\.jsonl cannot be written: No such file"):
        open_writer(run).__enter__()


@pytest.mark.parametrize("name", [".", "absent", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"is no run: it holds no readable run\.json"):
        load_run(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `schema`"),
        (b'{"schema": 1}', "missing required field `id`"),
        (b'{"schema": "1"}', r"Expected `int`, got `str` - at `\$\.schema`"),
        (b'{"schema": 1, "id": "\xff"}', "codec can't decode"),
    ],
)
def test_a_run_file_that_parbench_did_not_write_is_refused_with_the_fault(
    run: Path, content: bytes, words: str
) -> None:
    (run / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"run\.json is not what parbench wrote: .*{words}"):
        load_run(run)


def test_a_run_file_cut_short_anywhere_is_refused(run: Path) -> None:
    content = (run / "run.json").read_bytes().rstrip()
    for length in range(0, len(content), 97):
        (run / "run.json").write_bytes(content[:length])
        with pytest.raises(UserError, match="is not what parbench wrote"):
            load_info(run)


@pytest.mark.parametrize("other", [{}, {"plan": "of another shape"}])
def test_a_run_of_a_newer_parbench_is_refused_as_newer_whatever_its_shape(run: Path, other: dict[str, object]) -> None:
    raw = {**json.loads((run / "run.json").read_bytes()), "schema": SCHEMA + 1, **other}
    (run / "run.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=rf"run\.json: schema {SCHEMA + 1} is newer than {SCHEMA}"):
        load_run(run)


def test_a_bad_record_is_refused_with_its_run_and_line(run: Path) -> None:
    (run / "records.jsonl").write_bytes(encode(make_record()) + b"{}\n")
    with pytest.raises(UserError, match=rf"{run}/records\.jsonl, line 2 is no record"):
        load_run(run)


def test_a_plan_reads_back_from_a_run_equal_in_every_field(run: Path, plan: Plan) -> None:
    assert load_info(run).plan == plan


def test_a_timeline_lies_beside_its_record_and_one_that_is_damaged_is_named(run: Path) -> None:
    record, timeline = make_record(), Timeline(clock="one", uncertainty_seconds=0.0, ranks=())
    with open_writer(run) as writer:
        writer.write(record)
        writer.write_trace(trace_name(record), encode_timeline(timeline))
    read = load_run(run)
    assert load_timeline(read, record) == timeline
    assert load_timeline(read, make_record(launch=1)) is None
    (run / "traces" / trace_name(record)).write_bytes(b"no timeline")
    with pytest.raises(UserError, match=r"traces/.*\.json\.gz is not what parbench wrote"):
        load_timeline(read, record)
