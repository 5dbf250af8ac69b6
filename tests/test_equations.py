"""An equation that prints in symbols and in numbers: the one is the other, sign by sign."""

import pytest

from workloads.planner.equations import Equation


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2 Psi e (n - 1) / n", "2 * 1000 * 0.5 * (8 - 1) / 8"),
        ("(2 + 2) Psi", "(2 + 2) * 1000"),
        ("n (e + 4) (n - 1)", "8 * (0.5 + 4) * (8 - 1)"),
        ("Psi_x / n", "1234567890123 / 8"),
        ("thin", "1e-07"),
    ],
)
def test_symbols_become_numbers_and_factors_get_their_sign(text: str, numbers: str) -> None:
    symbols = {"Psi": 1000.0, "e": 0.5, "n": 8, "Psi_x": 1234567890123, "thin": 1e-7}
    assert Equation(text=text, symbols=symbols).numbers == numbers


def test_numbers_are_what_a_calculator_takes() -> None:
    equation = Equation(
        text="L (whole + split / t) + ends", symbols={"L": 2, "whole": 3, "split": 8, "t": 4, "ends": 0.5}
    )
    assert eval(equation.numbers) == 2 * (3 + 8 / 4) + 0.5
    assert equation.numbers.count(" ") == len(equation.numbers.split()) - 1


def test_a_symbol_without_a_number_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        _ = Equation(text="a b", symbols={"a": 1}).numbers
