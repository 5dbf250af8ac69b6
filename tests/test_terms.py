import pytest

from reports.terms import terms


def test_terms_come_in_the_order_asked_for() -> None:
    assert [term.name for term in terms(["noise", "busbw"])] == ["noise", "busbw"]


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("busbw", "2(n-1)/n"),
        ("algbw", "size / time"),
        ("exposed", "compute + exposed + copy + idle + residual = wall time"),
        ("bubble fraction, bubble overhead", "Idle / (ranks x makespan)"),
        ("fit", "latency + size / bandwidth"),
        ("speed-up, efficiency", "rate(n) / rate(n0)"),
        ("skew, transfer, late", "last arrival - first arrival"),
    ],
)
def test_a_word_is_explained_with_its_formula(name: str, formula: str) -> None:
    (term,) = terms([name])
    assert formula in term.text


def test_a_word_that_nobody_explains_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        terms(["bogus"])
