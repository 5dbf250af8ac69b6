"""Texts for users have no phrases that readers misunderstand: docs, help and messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PHRASES = (
    "tells?",
    "told",
    "nobody",
    "anew",
    "afresh",
    "beside",
    "held against",
    "(?<!there )is no",
    "has no word",
    "but for",
    "of one's own",
    "in turns",
    "gang",
)
UNCLEAR = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
PACKAGES = ("parbench", "bench", "workloads", "reports", "slurm")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
MODULES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def find_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string with several words, without docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if node in docstrings or not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def find_paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text().splitlines(), start=1)


@pytest.mark.parametrize(
    ("paths", "find_texts"),
    [
        (DOCUMENTS, find_paragraphs),
        (MODULES, find_messages),
    ],
)
def test_texts_have_no_unclear_phrase(paths, find_texts) -> None:  # type: ignore[no-untyped-def]
    assert paths
    unclear = []
    for path in paths:
        for line, text in find_texts(path):
            match = UNCLEAR.search(text)
            if match:
                unclear.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text!r}")
    assert not unclear, "\n".join(unclear)
