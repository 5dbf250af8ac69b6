"""What a report is made of: sections of tables with captions, terms and notes, for page and Markdown. Pure."""

from dataclasses import dataclass
from typing import Any, Generic

from bench.results.metrics import Metric
from reports.columns import Column, T


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word of the field with what it means here, its formula in it."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Panel(Generic[T]):
    """A table; ``id`` is its anchor, and what the page's figures of the same numbers are found by.

    ``has_facts`` says that each row's case is told in full below it, ``is_wide`` that its figures need the whole width.
    """

    id: str
    title: str
    caption: str
    columns: tuple[Column[T], ...]
    rows: tuple[T, ...]
    notes: tuple[str, ...] = ()
    has_facts: bool = False
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels that belong together under one heading, the terms that their columns use, and sentences of their own."""

    id: str
    title: str
    panels: tuple[Panel[Any], ...]
    terms: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def glossary(self) -> tuple[Term, ...]:
        """The section's terms, then the formulas of the metrics that its columns show, each once."""
        columns = [column for panel in self.panels for column in panel.columns]
        shown = {one.metric.name: one.metric for one in columns if one.metric and one.metric.formula}
        for term in self.terms:
            shown.pop(term.name, None)
        return (*self.terms, *map(_term_of, shown.values()))


def _term_of(metric: Metric) -> Term:
    name = metric.title if metric.name.replace("_", " ") == metric.title else f"{metric.title} ({metric.name})"
    return Term(name=name, text=f"{metric.help[0].upper()}{metric.help[1:]} ({metric.formula}).")
