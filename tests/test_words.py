"""Sentences about names."""

import pytest

from bench.words import did_you_mean, listed


@pytest.mark.parametrize(
    ("word", "hint"),
    [("blockin", "; did you mean 'blocking'?"), ("piplined", "; did you mean 'pipelined'?"), ("xyz", ""), ("", "")],
)
def test_a_hint_is_given_only_for_a_close_word(word: str, hint: str) -> None:
    assert did_you_mean(word, ("blocking", "pipelined")) == hint


def test_no_choices_give_no_hint() -> None:
    assert did_you_mean("word", iter(())) == ""


@pytest.mark.parametrize(
    ("choices", "words"),
    [(("a",), "a"), (("a", "b"), "a or b"), (("a", "b", "c"), "a, b or c"), ((1, 2.5), "1 or 2.5")],
)
def test_choices_are_listed_as_a_sentence_would(choices: tuple[object, ...], words: str) -> None:
    assert listed(choices) == words
