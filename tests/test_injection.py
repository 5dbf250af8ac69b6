"""What --inject means, and how it refuses what means nothing."""

import pytest

from bench.errors import UserError
from bench.injection import parse_injection


@pytest.mark.parametrize(
    ("text", "kind", "rank", "amount"),
    [("late:1:3ms", "late", 1, 3e-3), ("slow:0:10%", "slow", 0, 0.1), ("corrupt:3", "corrupt", 3, 0.0)],
)
def test_each_kind_is_understood(text: str, kind: str, rank: int, amount: float) -> None:
    found = parse_injection(text, nproc=4)
    assert (found.kind, found.rank, found.text) == (kind, rank, text)
    assert found.amount == pytest.approx(amount)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("later:1:3ms", "late:RANK:3ms"),
        ("late:1", "late:RANK:3ms"),
        ("late:one:3ms", "late:RANK:3ms"),
        ("corrupt:1:3ms", "corrupt:RANK"),
        ("late:1:soon", "soon"),
        ("slow:1:10", "such as 10%"),
        ("slow:1:0%", "such as 10%"),
        ("corrupt:4", "rank 4 is not one of the 4 ranks, 0 to 3"),
    ],
)
def test_what_means_nothing_is_refused_in_words(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_injection(text, nproc=4)
    assert told in str(caught.value)
