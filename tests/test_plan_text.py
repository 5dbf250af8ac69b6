"""What a reader sees: all of a dry run's numbers, what was assumed, and no number that is not there."""

import re

import pytest
from planner_asks import H100, ask

from workloads.planner.catalog import model_of
from workloads.planner.dry_run import dry_run
from workloads.planner.plan_text import (
    assumptions,
    claims_text,
    dry_run_text,
    duration,
    formulas_text,
    search_text,
    table,
)
from workloads.planner.published import claims
from workloads.planner.search import Wanted, search

RUN = dry_run(ask("dp=8,fsdp=4,pp=4,tp=8", "llama3-70b", microbatches=32), H100)
TEXT = dry_run_text(RUN, ["a note"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (12.345, "12.3 s"), (1, "1 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 us"), (123.4, "123 s")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    assert table(["name", "n"], [["a", "10"], ["long name", "5"]]).splitlines() == [
        "name        n",
        "a          10",
        "long name   5",
    ]


def test_it_says_first_that_nothing_was_measured() -> None:
    assert TEXT.startswith("Predicted, not measured: llama3-70b on 1024 GPUs (h100), mesh dp=8,fsdp=4,pp=4,tp=8")
    assert "global batch 1024 = 32 data ranks x 32 microbatches x 1" in TEXT


def test_every_rank_that_differs_has_a_row_with_its_memory() -> None:
    for held in RUN.ranks:
        [row] = [line for line in TEXT.splitlines() if line.startswith(held.part.words + " ")]
        assert row.endswith(f"{held.memory.total / 1e9:.2f}")
    assert "87% of 73.6 GB usable a GPU" in TEXT


def test_every_axis_has_a_row_with_its_bytes_and_assumption() -> None:
    for axis in RUN.time.axes:
        [row] = [line for line in TEXT.splitlines() if re.match(rf"{axis.name} +(inside|across)", line)]
        assert axis.assumption in row
        assert f"{axis.sent_bytes / 1e6:.3f} MB" in row or f"{axis.sent_bytes / 1e9:.3f} GB" in row


def test_shares_of_the_step_add_up() -> None:
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%$", TEXT, re.MULTILINE)]
    *parts, whole = shares[: shares.index(100.0) + 1]
    assert whole == 100.0
    assert sum(parts) == pytest.approx(100, abs=0.5)


def test_what_was_assumed_stands_below() -> None:
    told = TEXT[TEXT.index("Assumed:") :]
    for part in ("55% of 989.4 TFLOP/s", "80% of 450 GB/s", "fsdp 90%", "launch 8 us", "not checked", "a note"):
        assert part in told


def test_float32_says_that_it_is_tf32() -> None:
    assert "TFLOP/s * 0.5 for float32" in assumptions(H100, 4)
    assert "float32" not in assumptions(H100, 2)


def test_one_rank_has_no_axes_and_no_bubble() -> None:
    text = dry_run_text(dry_run(ask("dp=1"), H100))
    assert "sent a rank" not in text
    assert "bubble:" not in text


def test_formulas_have_three_lines_each() -> None:
    lines = formulas_text(RUN).splitlines()
    assert len(lines) % 3 == 0
    assert lines[0].startswith("parameters of a rank = ")
    assert all(line.startswith("  = ") for i, line in enumerate(lines) if i % 3)
    assert all(re.search(r"\[.+\]$", line) for line in lines[2::3])


def test_a_search_shows_candidates_what_binds_them_and_why() -> None:
    found = search(Wanted(model=model_of("llama3-8b"), gpus=16, global_batch=64), H100, top=3)
    text = search_text(found, "some words", ["a note"])
    assert text.startswith(f"Predicted, not measured: some words; {found.tried} candidates")
    for run, binding in zip(found.best, found.bindings, strict=True):
        assert re.search(rf"^{re.escape(run.ask.mesh_text)} .*{re.escape(binding)}", text, re.MULTILINE)
    assert "Why the first:\n  fit: " in text
    assert text.rstrip().endswith("a note")


def test_claims_stand_quoted_beside_predicted() -> None:
    text = claims_text(claims())
    assert len(text.splitlines()) == len(claims()) + 1
    assert re.search(r"zero3 +arXiv 1910\.02054, figure 1 +1\.88 GB +1\.88 GB", text)
    assert re.search(r"1f1b +.*0\.2727 +0\.2727", text)


def test_no_line_ends_in_blanks() -> None:
    assert all(line == line.rstrip() for line in (TEXT + claims_text(claims())).splitlines())


def test_what_a_reader_must_know_stands_below_its_number() -> None:
    run = dry_run(ask("cp=64,tp=8", model_of("llama3-8b", 4194304), checkpointing="selective"), H100)
    [caveat] = run.caveats
    assert f"MFU {run.mfu:.1%}\n{caveat}\n" in dry_run_text(run)
    found = search(Wanted(model=model_of("llama3-8b", 4194304), gpus=512, global_batch=1), H100, top=1)
    [best] = found.best
    assert f"\n{best.ask.mesh_text}: {best.caveats[0]}\n" in search_text(found, "some words")
