"""A stand-in for ``parbench run``: writes a real run folder, a record each so many seconds, and needs no ranks.

As a program it is the child of ``parbench.slurm.job.work``; ``standin(...)`` is the command that starts it.
"""

import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from parbench.bench.launch.driver import remaining
from parbench.bench.results.records import RankState, Record
from parbench.bench.results.runs import create_run, load_run, open_writer, utc_now
from parbench.slurm.job.point_run import Attempt
from tests.support import fakes
from tests.support.reports_fixtures import failed_record, ok_record

ENDS = ("ok", "wrong", "hang", "bad-input", "die", "stubborn", "blames")


def standin(
    *,
    cases: int = 2,
    each: float = 0.05,
    end: str = "ok",
    silent: str = "",
    told: list[Attempt] | None = None,
) -> Callable[[Attempt], list[str]]:
    """Return a command for ``slurm.job.work.work``; ``told`` collects its attempts, ``silent`` is a host that hangs."""

    def words(attempt: Attempt) -> list[str]:
        if told is not None:
            told.append(attempt)
        fresh = ["--out", f"{attempt.folder}/runs/{attempt.point.id}"]
        where = ["--resume", str(attempt.run)] if attempt.run else fresh
        return [
            sys.executable,
            "-m",
            "tests.support.standin",
            str(cases),
            str(each),
            end,
            silent,
            *where,
        ]

    return words


def counted(folder: Path, spoilt: Collection[str] = ()) -> Counter[tuple[str, str, int, str]]:
    """Return how often each (point, case, launch, status) stands in a sweep's records, but for runs that are spoilt."""
    return Counter(
        (records.parents[1].name, record.case.id, record.launch, record.status)
        for records in (folder / "runs").glob("*/*/records.jsonl")
        if str(records.parent.relative_to(folder)) not in spoilt
        for record in load_run(records.parent).records
    )


def _record(end: str, silent: str, record: Record, *, is_last: bool) -> Record:
    if not is_last or end not in ("wrong", "hang"):
        return record
    ranks = [
        RankState(rank=0, host=socket.gethostname(), pid=1, state="timed, step 3"),
        RankState(rank=1, host=silent, pid=2, state="no answer"),
    ]
    reason = {"wrong": "3 results are wrong", "hang": "no end within 10 s: rank 1 did not arrive"}[
        end
    ]
    return failed_record(
        record.case,
        0,
        "wrong" if end == "wrong" else "hang",
        reason,
        ranks=ranks,
        started=utc_now(),
    )


def main() -> int:
    cases, each, end, silent, option, where = sys.argv[1:]
    assert end in ENDS
    if end == "bad-input":
        print("parbench: --nodes 9: job 7 has 4", file=sys.stderr)
        return 2
    is_fresh = option == "--out"
    path = (
        create_run(Path(where), fakes.make_plan(map(fakes.make_fake_case, range(int(cases)))), "0")[
            0
        ]
        if is_fresh
        else Path(where)
    )
    run = load_run(path)
    todo = remaining(run)
    with open_writer(path) as writer:

        def stop(number: int, frame: object) -> None:
            if end == "blames":  # it sees its ranks die of the signal that ends the job
                writer.write(failed_record(todo[-1][1], started=utc_now()))
            sys.exit(4)

        signal.signal(signal.SIGTERM, signal.SIG_IGN if end == "stubborn" else stop)
        for index, (launch, case) in enumerate(todo):
            time.sleep(float(each))
            is_last = index == len(todo) - 1
            if end == "die" and is_last:
                signal.raise_signal(signal.SIGKILL)
            done = ok_record(case, launch, started=utc_now())
            writer.write(_record(end, silent, done, is_last=is_last))
    return {"ok": 0, "wrong": 1}.get(end, 4)


if __name__ == "__main__":
    sys.exit(main())
