"""A run is held to its budgets: kept, over, unknown or not run, each a sentence and an exit code."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from reports_fixtures import bad, collective, make_plan, make_run, ok, plain, step, training_metrics, write_run

from parbench import cli
from parbench.bench.results.budgets import Budget
from parbench.bench.results.records import Record
from parbench.bench.results.runs import Run
from parbench.reports.budgets import exit_code, judge, sentences

DDP, REDUCE, SMALL, COPY = step("ddp"), collective("all_reduce", 1 << 24), collective("all_reduce", 1024), "memory.copy"


def run_of(*records: Record, **more: Any) -> Run:
    return make_run(make_plan({one.case.id: one.case for one in records}.values(), **more), records)


def budget(metric: str, comparison: str, number: float, cases: str = "*") -> Budget:
    return Budget(cases=cases, metric=metric, text=f"{comparison}{number:g}", comparison=comparison, number=number)


def told(run: Run, *budgets: Budget) -> tuple[list[str], int]:
    found = judge(run, budgets)
    return [one.told for one in found if one.word != "KEPT"], exit_code(found)


def trained(**metrics: float) -> Record:
    own = {name: plain(number, "") for name, number in metrics.items()}
    return ok(DDP, metrics={**training_metrics(axes=("dp", "tp")), **own})


def test_what_is_over_its_budget_is_a_sentence_with_its_number() -> None:
    run = run_of(trained(**{"bytes_ratio.tp": 1.25}))
    for asked, expected in (
        (budget("exposed_fraction", "<", 0.31), None),
        (budget("exposed_fraction", "<", 0.1), "<0.1: it is 30.0 %"),
        (budget("bytes_ratio.dp", "==", 1), None),
        (budget("bytes_ratio", "==", 1), "==1: it is 1.250 on tp"),
        (budget("mfu", ">", 0.5), ">0.5: it is 34.5 %"),
        (budget("memory", "<", 2**21 + 1), "<2.09715e+06: it is 3.00 MiB on activations"),
        (budget("step_time", "<", 0.001), "<0.001: it is 10.0 ms [9.00, 11.0]"),
    ):
        sentence = f"Budget: {asked.metric} of step.ddp layers=4 has to be {expected}."
        assert told(run, asked) == (([], 0) if expected is None else ([sentence], 1)), asked


def test_of_several_cases_the_farthest_is_named_and_the_others_are_counted() -> None:
    run = run_of(ok(REDUCE, seconds=1e-3), ok(SMALL, seconds=1e-3), trained())
    [sentence], code = told(run, budget("time", "<", 1e-6, "collective.*"))
    assert sentence.endswith("it is 1.00 ms [0.900, 1.10]; so do 2 cases of 2.")
    assert code == 1
    [sentence], _ = told(run, budget("busbw", ">", 1e9, "collective.*"))
    assert sentence.endswith("mode=blocking has to be >1e+09: it is 0.00154 GB/s."), "the other keeps it"
    assert "size_bytes=1024 " in sentence


def test_the_share_of_a_copy_is_of_the_run() -> None:
    copy = ok(collective("copy", 1 << 24), seconds=1e-3)
    copy = ok(type(copy.case)(id="c", name=COPY, target="t", params=copy.case.params), seconds=1e-3)
    asked = budget("busbw_of_copy", ">", 1.6, "collective.*")
    [over], code = told(run_of(ok(REDUCE, seconds=1e-3), copy), asked)
    assert ("it is 150 %" in over, code) == (True, 1)
    assert told(run_of(ok(REDUCE, seconds=0.9e-3), copy), asked) == ([], 0)
    [unknown], code = told(run_of(ok(REDUCE, seconds=1e-3)), asked)
    assert ("cannot be told: it is not known of it" in unknown, code) == (True, 3), "without a copy"


def test_what_is_unknown_is_never_kept_and_what_did_not_run_is_told_with_why() -> None:
    unknown = ok(DDP, metrics={**training_metrics(), "overlap": plain(None, "")})
    for asked in (budget("overlap", ">", -1), budget("bubble_fraction", "<", 1)):
        [sentence], code = told(run_of(unknown), asked)
        assert ("cannot be told" in sentence, code) == (True, 3), asked
    for records in ((bad(DDP, 0, "failed", "rank 1 died"),), (bad(DDP, 0, "skipped", "no time"),)):
        [sentence], code = told(run_of(*records), budget("mfu", ">", 0))
        assert (f"it did not run: {records[0].reason}" in sentence, code) == (True, 4)
    [sentence], code = told(run_of(bad(DDP, 0, "wrong", "3 differ"), ok(REDUCE)), budget("mfu", ">", 0, "ddp"))
    assert ("3 differ" in sentence, code) == (True, 4)
    empty = make_run(make_plan([DDP]), [])
    assert told(empty, budget("mfu", ">", 0))[1] == 4


def test_the_worst_gives_the_exit_code_and_the_runs_own_counts() -> None:
    run = run_of(trained(), bad(REDUCE, 0, "failed", "x"))
    over, unknown = budget("mfu", ">", 1, "ddp"), budget("drop_rate", "<", 1, "ddp")
    lost, kept = budget("time", "<", 1, "all_reduce"), budget("mfu", ">", 0, "ddp")
    for asked, own, code in (
        ((kept,), 0, 0),
        ((kept,), 4, 4),
        ((kept, unknown), 0, 3),
        ((unknown, lost), 0, 4),
        ((unknown, lost, over), 0, 1),
        ((unknown,), 1, 1),
        ((over,), 4, 1),
    ):
        assert exit_code(judge(run, asked), own) == code
    assert sentences(judge(run, [kept, kept])) == ("Budgets: all 2 are kept.",)
    assert sentences(judge(run, [kept])) == ("Budgets: it is kept.",)
    assert sentences(()) == ()
    assert len(sentences(judge(run, [kept, over, unknown]))) == 2


def test_compare_says_of_new_how_it_keeps_its_budgets_in_every_form(tmp_path: Path) -> None:
    base, new = (write_run(tmp_path / name, run_of(trained(mfu=mfu))) for name, mfu in (("base", 0.1), ("new", 0.5)))
    file = tmp_path / "budgets.toml"

    def compared(text: str, *words: str, runs: tuple[Path, Path] = (base, new)) -> tuple[int, str]:
        file.write_text(text)
        done = CliRunner().invoke(cli.main, ["compare", *map(str, runs), "--budgets", str(file), *words])
        return done.exit_code, done.output

    code, text = compared('"step.ddp" = { mfu = ">40%" }')
    assert (code, text.startswith("Budgets: it is kept.\n")) == (0, True)
    over = "Budget: mfu of step.ddp layers=4 has to be >40%: it is 10.0 %."
    code, text = compared('"step.ddp" = { mfu = ">40%" }', runs=(new, base))
    assert (code, text.startswith(over)) == (1, True)
    code, text = compared('"step.ddp" = { mfu = ">40%" }', "--format", "markdown", runs=(new, base))
    assert (code, "mfu of step.ddp layers=4 has to be" in text.split("Counts")[0]) == (1, True)
    code, text = compared('"step.ddp" = { mfu = ">40%", drop_rate = "<1" }', "--format", "json")
    assert (code, [one["word"] for one in json.loads(text)["budgets"]]) == (3, ["KEPT", "UNKNOWN"])
    code, text = compared('"step.ddp" = { mfu = ">40%" }', "--format", "junit", runs=(new, base))
    assert (code, 'type="OVER"' in text, 'name="step.ddp mfu &gt;40%"' in text) == (1, True, True)
    code, text = compared('"step.fsdp" = { mfu = ">40%" }')
    assert (code, "fits no case of the run" in text) == (2, True)
