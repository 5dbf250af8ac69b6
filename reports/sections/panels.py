"""What a report is made of: sections of tables with captions, terms and notes, for page and Markdown. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic

from bench.plan.catalogue import busbw_words
from bench.results.metrics import Metric
from reports.sections.columns import Column, T


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


_TEXTS = {
    "sample": "One iteration's duration on the slowest rank: an operation is done when its last rank is.",
    "launch": (
        "One start of all ranks with new process groups. What differs between launches is not seen within one, so "
        "intervals over several launches are the ones to compare by."
    ),
    "interval": (
        "[low, high] covers the true median in 95 % of such runs, if launches are alike (several launches) or if "
        "iterations are independent (one launch: they seldom are, so it is too narrow)."
    ),
    "noise": (
        "The interquartile range over the median: stable below 5 %, fair below 15 %, noisy below 40 %, else very noisy."
    ),
    "blocking, pipelined": (
        "One operation at a time from a barrier (how long does one take?), or many back to back (how much goes "
        "through?). They are different series."
    ),
    "busbw": (
        f"Bus bandwidth: algbw x nccl-tests' factor for what the links carry on n ranks: {busbw_words()}. So it can be "
        "held against a link's speed. The factor assumes point-to-point links: reduction in the network can read "
        "higher."
    ),
    "fit": (
        "The line of time over size that explains an operation: latency + size / bandwidth. More than one line where "
        "the times ask for it. n_1/2 = latency x bandwidth is the size that takes twice the latency, and so reaches "
        "half the bandwidth."
    ),
    "knee": (
        "The size at which another line begins, as where a protocol switches: where the lines cross if they do so "
        "between two measured sizes, else the geometric middle of those two."
    ),
    "off the curve": (
        "Sizes further than 20 % and four times the usual scatter from the fit. They are shown, and hardly weigh in it."
    ),
    "factor, beside": "Time disturbed / time undisturbed, paired by launch: 1 is as fast as undisturbed.",
    "late": (
        "A rank's lateness = its arrival - the first's. Late names the rank that most often arrives last and its share "
        "of iterations; unknown where the clock's uncertainty exceeds the skew."
    ),
    "parts of a step": (
        "compute + exposed communication + copy + idle + residual = wall time of a traced step; the rest of "
        "communication is hidden behind computation."
    ),
    "idle: schedule, imbalance, p2p, rest": "Differences of simulations that add up to the measured idle time.",
    "phases": (
        "Forward, backward and update as the step itself names them, on the host's clock; communication lasts from its "
        "issue to its end, so it may begin before its peers have come."
    ),
    "F, B, I, W": (
        "Forward; the whole backward; its input gradient and its weight gradient, where a schedule parts them. A "
        "microbatch is in flight on a rank from its forward until the end of its backward."
    ),
    "speed-up, efficiency": (
        "Against the smallest world of the same case, n0 ranks: speed-up = rate(n) / rate(n0), with tokens a second or "
        "busbw as the rate. Efficiency = speed-up x n0 / n for steps, whose work grows with the ranks; for "
        "communication it is the speed-up itself, for busbw does not grow with the ranks."
    ),
    "ratio": (
        "Time / time in the first run; its 95 % interval is that of both times, their half-widths added in quadrature "
        "on log axes. Whether a run is slower, parbench compare decides."
    ),
}


def terms(names: Iterable[str]) -> tuple[Term, ...]:
    """Return the named terms in order."""
    return tuple(Term(name=name, text=_TEXTS[name]) for name in names)
