"""One start of ranks: missing ranks, deadlines, and results that arrive in the last moment."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parbench.bench.launch import ranks as module
from parbench.bench.launch.messages import Job, StepBegun
from tests.support.fakes import (
    Script,
    ScriptedRanks,
    complete_job,
    make_fake_case,
    make_hello,
    make_job,
    make_outcome,
    make_status,
    time_limit,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(module, "_OWN_DEADLINE_SECONDS", 0.0)
    with time_limit(60):
        yield


def start_ranks(folder: Path, num_started: int, script: Script = complete_job) -> ScriptedRanks:
    """Start so many of two ranks."""
    hellos = [make_hello(rank) for rank in range(num_started)]
    return ScriptedRanks(2, folder / "attempt-0", hellos, script)


def test_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.01)
    failure = start_ranks(tmp_path, 1).wait_for_start()
    assert failure is not None
    assert failure.reason == "rank 1 did not start within 0 s"


def test_error_before_all_ranks_have_started_is_reported(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, 1)
    ranks.fail(1, "ImportError: no module named x")
    failure = ranks.wait_for_start()
    assert failure is not None
    assert failure.reason == "rank 1 raised ImportError: no module named x"


def start_job(folder: Path, script: Script, timeout_seconds: float = 10.0) -> ScriptedRanks:
    """Give two ranks a job of one case, to which they react by the script."""
    ranks = start_ranks(folder, 2, script)
    assert ranks.wait_for_start() is None
    ranks.send_job(make_job([make_fake_case()], timeout_seconds=timeout_seconds))
    return ranks


def test_hang_that_one_rank_reports_names_the_other(tmp_path: Path) -> None:
    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        ranks.post(0, make_status())
        yield

    ranks = start_job(tmp_path, act)
    failure = ranks.wait_for_block()
    assert failure.reason == "timed out after 10 s: rank 1 did not arrive"


def test_driver_ends_ranks_that_cannot_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C code that holds the interpreter lock stops the watchdog; the interpreter writes stacks."""

    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        (tmp_path / "attempt-0" / "rank-1.stack").write_text("in C code")
        yield

    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    ranks = start_job(tmp_path, act, timeout_seconds=0.05)
    failure = ranks.wait_for_block()
    assert failure.reason == "timed out after 0.05 s: no rank answers"
    assert [state.stack for state in failure.ranks] == ["", "in C code"]


def test_block_that_ends_at_its_deadline_is_no_hang(tmp_path: Path) -> None:
    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        ranks.post(0, make_status())
        ranks.finish()
        yield

    ranks = start_job(tmp_path, act)
    assert ranks.wait_for_block() == make_outcome()


def test_driver_waits_while_steps_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        for _ in range(10):
            time.sleep(0.1)
            ranks.post(0, StepBegun())
            yield
        ranks.finish()
        yield

    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    ranks = start_job(tmp_path, act, timeout_seconds=0.3)
    assert ranks.wait_for_block() == make_outcome()


def test_rank_that_has_completed_its_job_may_end_before_the_others(tmp_path: Path) -> None:
    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        ranks.complete(1)
        yield
        ranks.finish()
        yield

    ranks = start_job(tmp_path, act)
    assert ranks.wait_for_block() == make_outcome()


@pytest.mark.parametrize("num_polls", [1, 5])
def test_result_that_arrives_when_the_launcher_has_ended_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_polls: int
) -> None:
    """The launcher ends between two checks, or a shared file system shows the message late."""

    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        ranks.has_ended = True
        for _ in range(num_polls):
            yield
        ranks.finish()
        yield

    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.2)
    ranks = start_job(tmp_path, act)
    assert ranks.wait_for_block() == make_outcome()


def test_results_that_waited_for_a_stopped_driver_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that Ctrl-Z stops does not blame ranks, which continue."""

    def act(ranks: ScriptedRanks, job: Job) -> Iterator[None]:
        yield
        ranks.finish()
        yield

    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    ranks = start_job(tmp_path, act, timeout_seconds=0.1)
    ranks.receive()
    time.sleep(0.3)
    assert ranks.wait_for_block() == make_outcome()
