"""Files of limits: operators, numbers and units of declared metrics."""

from pathlib import Path

import pytest

from parbench.bench.results.limits import MetricLimit, read_limits
from tests.support.refusals import usage_error
from tests.support.reports.reports_fixtures import collective_case, step_case

CASES = (step_case("ddp"), collective_case("all_reduce", 1 << 20))


def read_text(folder: Path, text: str) -> tuple[MetricLimit, ...]:
    file = folder / "limits.toml"
    file.write_text(text)
    return read_limits(file, CASES)


@pytest.mark.parametrize(
    ("metric", "limit", "number"),
    [
        ("exposed_fraction", "<10%", 0.1),
        ("step_time", "<30ms", 0.030),
        ("memory_counted.parameters", "< 1.5GiB", 1.5 * 2**30),
        ("busbw", "<1.2GB/s", 1.2e9),
        ("idle_rest", "<-1e-3s", -1e-3),
        ("bytes_ratio.dp", "<1", 1.0),
        ("calls", "<2", 2.0),
    ],
)
def test_limit_is_read_in_the_unit_of_its_metric(
    tmp_path: Path, metric: str, limit: str, number: float
) -> None:
    [parsed] = read_text(tmp_path, f'"step.ddp" = {{ "{metric}" = "{limit}" }}')
    assert parsed.metric == metric
    assert parsed.operator == "<"
    assert parsed.number == pytest.approx(number)


@pytest.mark.parametrize(
    ("operator", "met_values"),
    [
        ("<", [0.29]),
        ("<=", [0.29, 0.3]),
        ("==", [0.3]),
        (">=", [0.3, 0.31]),
        (">", [0.31]),
    ],
)
def test_operator_is_met_by_its_values(operator: str, met_values: list[float]) -> None:
    limit = MetricLimit(cases="*", metric="mfu", text="", operator=operator, number=0.3)
    assert [value for value in (0.29, 0.3, 0.31) if limit.is_met(value)] == met_values


@pytest.mark.parametrize("name", ["exposed", "bytes_ratio.", ""])
def test_unknown_metric_is_refused(tmp_path: Path, name: str) -> None:
    assert f"{name} of 'ddp'" in usage_error(
        read_text, tmp_path, f'"ddp" = {{ "{name}" = ">0" }}'
    )


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ('"ddp" = { exposed_fracton = "<1" }', "did you mean 'exposed_fraction'?"),
        ('"ddp" = { step_time = "<30" }', "a number in s, ms or us"),
        ('"ddp" = { mfu = 1 }', "got `int`"),
        ('"step.dpp" = { mfu = ">1" }', "It has step.ddp"),
        ('"ddp" = {', "is not TOML"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, fact: str) -> None:
    message = usage_error(read_text, tmp_path, text)
    assert str(tmp_path / "limits.toml") in message
    assert fact in message
