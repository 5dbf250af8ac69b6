"""A file of budgets is read whole or refused in a sentence: metrics by their declared names, numbers with units."""

from pathlib import Path

import pytest

from parbench.bench.plan.plan import Skipped
from parbench.bench.results.budgets import Budget, metric_of, read_budgets
from tests.support.refusals import usage_error
from tests.support.reports_fixtures import collective_case, step_case

CASES = (step_case("ddp"), collective_case("all_reduce", 1 << 20))


def read(tmp_path: Path, text: str, skipped: tuple[Skipped, ...] = ()) -> tuple[Budget, ...]:
    file = tmp_path / "budgets.toml"
    file.write_text(text)
    return read_budgets(file, CASES, skipped)


def test_limits_are_read_by_the_units_of_their_metrics(tmp_path: Path) -> None:
    for metric, text, comparison, number in (
        ("exposed_fraction", "<10%", "<", 0.1),
        ("bytes_ratio", "==1", "==", 1.0),
        ("busbw_of_copy", "> 15 %", ">", 0.15),
        ("step_time", "<=30ms", "<=", 0.030),
        ("step_time_p99", "< 1.5 s", "<", 1.5),
        ("time", "<250us", "<", 250e-6),
        ("memory_counted.parameters", "<= 1.5GiB", "<=", 1.5 * 2**30),
        ("sent.dp.all_reduce", "==3000B", "==", 3000.0),
        ("busbw", ">=1.2GB/s", ">=", 1.2e9),
        ("tokens_per_second", ">1e4", ">", 1e4),
        ("tokens_per_second", ">5 tokens/s", ">", 5.0),
        ("idle_rest", ">-1e-3s", ">", -1e-3),
    ):
        [found] = read(tmp_path, f'"step.ddp" = {{ "{metric}" = "{text}" }}')
        assert (found.metric, found.comparison) == (metric, comparison)
        assert found.number == pytest.approx(number), text


def test_every_comparison_keeps_what_it_says_and_nothing_else() -> None:
    for comparison, kept in (("<", "l"), ("<=", "le"), ("==", "e"), (">=", "eg"), (">", "g")):
        budget = Budget(cases="*", metric="mfu", text="", comparison=comparison, number=0.3)
        for name, value in (("l", 0.29), ("e", 0.1 + 0.2), ("g", 0.31)):
            if (comparison, name) not in (
                ("<", "e"),
                (">", "e"),
                (">=", "e"),
                ("<=", "e"),
            ):  # 0.1 + 0.2 is above 0.3
                assert budget.is_kept(value) == (name in kept), (comparison, name)
        assert budget.is_kept(0.3) == ("e" in kept), comparison


def test_cases_are_named_as_by_only_or_by_their_parameters() -> None:
    for pattern, expected in (
        ("step.ddp", [True, False]),
        ("ddp", [True, False]),
        ("collective.*", [False, True]),
        ("*size_bytes=1048576*", [False, True]),
        ("*", [True, True]),
    ):
        budget = Budget(cases=pattern, metric="mfu", text="", comparison="<", number=0.0)
        assert [budget.fits(case) for case in CASES] == expected, pattern


def test_a_name_without_its_axis_stands_for_every_axis() -> None:
    for name, known in (
        ("bytes_ratio", True),
        ("bytes_ratio.dp", True),
        ("calls", True),
        ("calls.dp.all_reduce", True),
        ("memory", True),
        ("step_time_p99", True),
        ("bubble_fraction_simulated", True),
        ("exposed", False),
        ("mine_p99", False),
        ("mine_simulated", False),
        ("bytes_ratio.", False),
        ("", False),
    ):
        assert (metric_of(name) is not None) == known, name


def test_a_bad_file_is_one_sentence(tmp_path: Path) -> None:
    lost = (Skipped(case=step_case("fsdp"), reason="needs 4 ranks"),)
    names = "step.ddp and collective.all_reduce"
    for text, told in (
        (
            '"ddp" = { exposed_fracton = "<1" }',
            "'ddp' is no metric; did you mean 'exposed_fraction'?",
        ),
        (
            '"ddp" = { mfu = "30%" }',
            "mfu of 'ddp' has to be '30%', which is not understood: write one of <=, >=",
        ),
        ('"ddp" = { mfu = ">30ms" }', "a number, its unit % or none"),
        ('"ddp" = { step_time = "<30" }', "a number, its unit s, ms or us"),
        ('"ddp" = { mfu = "> 1 > 2" }', "not understood"),
        ('"ddp" = { mfu = ">=nan" }', "not understood"),
        ('"ddp" = { mfu = 1 }', "Expected `str`, got `int`"),
        ('step.ddp = { mfu = ">1" }', "Expected `str`, got `object`"),
        (
            '"step.dpp" = { mfu = ">1" }',
            f"'step.dpp' fits no case of the run, which has {names}; did you mean",
        ),
        ('"fsdp" = { mfu = ">1" }', "'fsdp' fits only what cannot run here: needs 4 ranks"),
        ("", "it has none; write such as"),
        ('"ddp" = {', "is no TOML"),
    ):
        sentence = usage_error(read, tmp_path, text, lost)
        assert told in sentence, sentence
        assert sentence.startswith(f"budgets {tmp_path / 'budgets.toml'}"), sentence
    assert "cannot be read: No such file" in usage_error(
        read_budgets, tmp_path / "none.toml", CASES
    )
