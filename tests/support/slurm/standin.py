"""A stand-in for ``parbench run`` as the child of a job: a shell that appends prepared records.

``stand_in(...)`` is a ``Command`` of ``parbench.slurm.job.child``. It writes the run folder in
this process and returns a shell command that appends the records which are missing, so the child
needs no ranks and no Python.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parbench.bench.launch.driver import list_pending
from parbench.bench.results.records import Record, encode_record
from parbench.bench.results.runs import create_run, load_run
from parbench.slurm.job.child import Command, PointRequest
from tests.support.fakes import make_fake_case, make_plan
from tests.support.reports.reports_fixtures import failed_record, ok_record

Ending = Literal["ok", "wrong", "hang", "bad-input", "killed", "ignores-sigterm", "ranks-died"]
"""The way a child ends: ``killed`` writes all records except the last and ends with SIGKILL,
``ranks-died`` blames its last case when it receives SIGTERM, and ``ignores-sigterm`` continues."""

_EXIT_CODES = {"wrong": 1, "hang": 4}

_APPEND_RECORDS = """
eval "$4"
while IFS= read -r record; do
    sleep "$3"
    printf '%s\\n' "$record" >> "$2"
done < "$1"
eval "$5"
"""
"""Arguments: prepared records, the run's records, seconds per record, first and last action."""

_FAR_FUTURE = "9999-01-01T00:00:00.000Z"


@dataclass(frozen=True, kw_only=True)
class RecordKey:
    """The identity and the status of a record in a sweep."""

    point: str
    case: str
    repetition: int
    status: str


def stand_in(
    *,
    num_cases: int = 1,
    seconds_per_case: float = 0.0,
    ending: Ending = "ok",
    requests: list[PointRequest] | None = None,
) -> Command:
    """Return a command whose child records ``num_cases``; ``requests`` collects its requests."""

    def command(request: PointRequest) -> list[str]:
        if requests is not None:
            requests.append(request)
        if ending == "bad-input":
            return ["sh", "-c", "echo 'error: --nodes 9: job 7 has 4' >&2; exit 2"]
        run = request.run or _create_run(request, num_cases)
        records = _missing_records(run, ending)
        prepared = request.folder / "logs" / f"{request.point.id}.prepared"
        prepared.write_bytes(b"".join(map(encode_record, records)))
        arguments = [str(prepared), str(run / "records.jsonl"), str(seconds_per_case)]
        return ["sh", "-c", _APPEND_RECORDS, "sh", *arguments, *_shell_actions(run, ending)]

    return command


def _create_run(request: PointRequest, num_cases: int) -> Path:
    plan = make_plan([make_fake_case(number) for number in range(num_cases)])
    run, _ = create_run(request.folder / "runs" / request.point.id, plan, "0")
    return run


def _missing_records(run: Path, ending: Ending) -> list[Record]:
    records = []
    for repetition, cases in list_pending(load_run(run)):
        records += [ok_record(case, repetition, n=3) for case in cases]
    if ending == "killed":
        return records[:-1]
    if ending == "wrong":
        records[-1] = failed_record(
            records[-1].case, status="wrong", reason="3 results are wrong"
        )
    if ending == "hang":
        records[-1] = failed_record(
            records[-1].case, status="hang", reason="timed out after 10 s"
        )
    return records


def _shell_actions(run: Path, ending: Ending) -> tuple[str, str]:
    """Return the first and the last shell command of a child."""
    if ending == "ignores-sigterm":
        return "trap '' TERM", "exit 0"
    if ending == "ranks-died":
        case = load_run(run).info.plan.cases[-1]
        blame = run / "blame"
        blame.write_bytes(encode_record(failed_record(case, started=_FAR_FUTURE)))
        return f"trap 'cat {blame} >> {run}/records.jsonl; exit 4' TERM", "exit 0"
    if ending == "killed":
        return "", "kill -KILL $$"
    return "", f"exit {_EXIT_CODES.get(ending, 0)}"


def count_records(folder: Path) -> Counter[RecordKey]:
    """Count the records of a sweep by point, case, repetition and status."""
    counts: Counter[RecordKey] = Counter()
    for path in (folder / "runs").glob("*/*/records.jsonl"):
        point = path.parent.parent.name
        for record in load_run(path.parent).records:
            key = RecordKey(
                point=point,
                case=record.case.id,
                repetition=record.repetition,
                status=record.status,
            )
            counts[key] += 1
    return counts


def assert_measured_once(folder: Path, num_records: int) -> None:
    """Check that a sweep has this number of records, none of them twice."""
    counts = count_records(folder)
    assert len(counts) == num_records
    assert set(counts.values()) == {1}
