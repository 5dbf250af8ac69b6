"""The exit code of a command with several results."""

import pytest

from parbench.bench.exit_codes import combine_exit_codes


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 4], 4),
        ([4, 1], 1),
        ([4, 1, 2], 1),
        ([2, 4], 2),
    ],
)
def test_certain_result_precedes_missing_one(codes: list[int], expected: int) -> None:
    assert combine_exit_codes(codes) == expected
