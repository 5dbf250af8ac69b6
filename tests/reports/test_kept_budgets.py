"""A run and its limits: kept, over, unknown or not run, with a sentence and an exit code."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parbench import cli
from parbench.bench.plan.cases import Case
from parbench.bench.results.budgets import Budget
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.budgets import exit_code, judge, sentences
from tests.support.reports_fixtures import (
    collective_case,
    counted_metric,
    failed_record,
    make_plan,
    make_run,
    ok_record,
    step_case,
    training_metrics,
    write_run,
)

DDP, REDUCE, SMALL = (
    step_case("ddp"),
    collective_case("all_reduce", 1 << 24),
    collective_case("all_reduce", 1024),
)


def run_of(*records: Record) -> Run:
    return make_run(
        make_plan({record.case.id: record.case for record in records}.values()), records
    )


def budget(metric: str, comparison: str, number: float, cases: str = "*") -> Budget:
    text = f"{comparison}{number:g}"
    return Budget(cases=cases, metric=metric, text=text, comparison=comparison, number=number)


def judged(run: Run, asked: Budget) -> tuple[str, int]:
    """Return the sentence of a budget that is not kept, and the exit code."""
    verdicts = judge(run, [asked])
    return "".join(v.told for v in verdicts if v.word != "KEPT"), exit_code(verdicts)


def trained(**metrics: float) -> Record:
    changed = {name: counted_metric(number, "") for name, number in metrics.items()}
    return ok_record(DDP, metrics={**training_metrics(axes=("dp", "tp")), **changed})


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        (budget("exposed_fraction", "<", 0.1), "30.0 %"),
        (budget("bytes_ratio", "==", 1), "1.250 on tp"),
        (budget("mfu", ">", 0.5), "34.5 %"),
        (budget("memory", "<", 2**21 + 1), "3.00 MiB on activations"),
        (budget("step_time", "<", 0.001), "10.0 ms [9.00, 11.0]"),
    ],
)
def test_exceeded_budget_names_case_limit_and_value(asked: Budget, value: str) -> None:
    sentence, code = judged(run_of(trained(**{"bytes_ratio.tp": 1.25})), asked)
    assert code == 1
    for fact in (asked.metric, "step.ddp", asked.text, value):
        assert fact in sentence


def test_kept_budget_passes() -> None:
    run = run_of(trained(**{"bytes_ratio.tp": 1.25}))
    for asked in (budget("exposed_fraction", "<", 0.31), budget("bytes_ratio.dp", "==", 1)):
        assert judged(run, asked) == ("", 0)


def test_budget_of_several_cases_names_the_farthest() -> None:
    run = run_of(ok_record(REDUCE, seconds=1e-3), ok_record(SMALL, seconds=1e-3), trained())
    sentence, code = judged(run, budget("time", "<", 1e-6, "collective.*"))
    assert ("2 cases of 2" in sentence, code) == (True, 1)
    sentence, _ = judged(run, budget("busbw", ">", 1e9, "collective.*"))
    assert "size_bytes=1024 " in sentence
    assert "0.00154 GB/s" in sentence


def test_share_of_copy_uses_the_copy_of_the_run() -> None:
    params = collective_case("copy", 1 << 24).params
    copy = ok_record(Case(id="c", name="memory.copy", target="t", params=params), seconds=1e-3)
    asked = budget("busbw_of_copy", ">", 1.6, "collective.*")
    sentence, code = judged(run_of(ok_record(REDUCE, seconds=1e-3), copy), asked)
    assert ("150 %" in sentence, code) == (True, 1)
    assert judged(run_of(ok_record(REDUCE, seconds=0.9e-3), copy), asked) == ("", 0)
    assert judged(run_of(ok_record(REDUCE, seconds=1e-3)), asked)[1] == 3, "without a copy"


def test_unknown_metric_is_never_kept() -> None:
    unknown = ok_record(DDP, metrics={**training_metrics(), "overlap": counted_metric(None, "")})
    for asked in (budget("overlap", ">", -1), budget("bubble_fraction", "<", 1)):
        assert judged(run_of(unknown), asked)[1] == 3


@pytest.mark.parametrize(
    "record",
    [
        failed_record(DDP, 0, "failed", "rank 1 died"),
        failed_record(DDP, 0, "skipped", "no time"),
        failed_record(DDP, 0, "wrong", "3 differ"),
    ],
)
def test_budget_of_a_bad_case_gives_its_reason(record: Record) -> None:
    sentence, code = judged(run_of(record, ok_record(REDUCE)), budget("mfu", ">", 0, "ddp"))
    assert (record.reason in sentence, code) == (True, 4)


def test_budget_of_a_missing_case_fails() -> None:
    assert judged(make_run(make_plan([DDP]), []), budget("mfu", ">", 0))[1] == 4


OVER, UNKNOWN = budget("mfu", ">", 1, "ddp"), budget("drop_rate", "<", 1, "ddp")
LOST, KEPT = budget("time", "<", 1, "all_reduce"), budget("mfu", ">", 0, "ddp")


@pytest.mark.parametrize(
    ("asked", "run_code", "code"),
    [
        ([KEPT], 0, 0),
        ([KEPT], 4, 4),
        ([KEPT, UNKNOWN], 0, 3),
        ([UNKNOWN, LOST], 0, 4),
        ([UNKNOWN, LOST, OVER], 0, 1),
        ([UNKNOWN], 1, 1),
        ([OVER], 4, 1),
    ],
)
def test_exit_code_is_the_worst_of_budgets_and_run(
    asked: list[Budget], run_code: int, code: int
) -> None:
    run = run_of(trained(), failed_record(REDUCE, 0, "failed", "x"))
    assert exit_code(judge(run, asked), run_code) == code


def test_sentences_summarize_kept_budgets() -> None:
    run = run_of(trained())
    assert len(sentences(judge(run, [KEPT, KEPT]))) == 1
    assert len(sentences(judge(run, [KEPT, OVER, UNKNOWN]))) == 2
    assert sentences(()) == ()


def compare(folder: Path, base: float, new: float, limits: str, *words: str) -> Result:
    (folder / "budgets.toml").write_text(limits)
    runs = [str(write_run(folder, run_of(trained(mfu=mfu)))) for mfu in (base, new)]
    options = ["--budgets", str(folder / "budgets.toml"), *words]
    return CliRunner().invoke(cli.main, ["compare", *runs, *options])


def test_compare_checks_budgets_of_new_in_every_format(tmp_path: Path) -> None:
    mfu = '"step.ddp" = { mfu = ">40%" }'
    assert compare(tmp_path, 0.1, 0.5, mfu).exit_code == 0
    for form, fact in (("table", "10.0 %"), ("markdown", "mfu"), ("junit", "OVER")):
        result = compare(tmp_path, 0.5, 0.1, mfu, "--format", form)
        assert (result.exit_code, fact in result.output) == (1, True)
    unknown = '"step.ddp" = { mfu = ">40%", drop_rate = "<1" }'
    result = compare(tmp_path, 0.1, 0.5, unknown, "--format", "json")
    verdicts = [entry["word"] for entry in json.loads(result.output)["budgets"]]
    assert (result.exit_code, verdicts) == (3, ["KEPT", "UNKNOWN"])
    assert compare(tmp_path, 0.1, 0.5, '"step.fsdp" = { mfu = ">40%" }').exit_code == 2
