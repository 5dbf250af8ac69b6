"""Sentences about names: what was meant, and what is allowed."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a choice is close to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(choices: Iterable[object]) -> str:
    """Return the choices as ``a, b or c``."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
